"""ResNet-20 as a party's tower (He et al., 2016, section 4.2)."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Two 3x3 convolutions with batch normalisation, and what they leave out beside them."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.stride = channels // inputs
        self.first = nn.Conv2d(inputs, channels, 3, self.stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Images [R, inputs, H, W] to [R, channels, H / stride, W / stride]."""
        z = functional.relu(self.norms[0](self.first(x)))
        z = self.norms[1](self.second(z))
        beside = x[:, :, :: self.stride, :: self.stride]
        missing = z.shape[1] - beside.shape[1]
        return functional.relu(z + functional.pad(beside, (0, 0, 0, 0, 0, missing)))


class ResNet20(nn.Module):
    """Images [R, H, W, colours] to embeddings [R, size], as many as the last stage has channels."""

    def __init__(self, sample: Tensor, size: int) -> None:
        super().__init__()
        width = size // 4
        self.first = nn.Conv2d(sample.shape[-1], width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        widths = [width, *[width] * 3, *[2 * width] * 3, *[4 * width] * 3]
        self.blocks = nn.Sequential(*(Block(*pair) for pair in pairwise(widths)))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings [R, size]."""
        z = self.blocks(functional.relu(self.norm(self.first(x.permute(0, 3, 1, 2)))))
        pooled: Tensor = z.mean(dim=(2, 3))
        return pooled
