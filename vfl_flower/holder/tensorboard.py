from vfl_flower.holder.observers import Observer


class TensorBoard(Observer):
    pass
