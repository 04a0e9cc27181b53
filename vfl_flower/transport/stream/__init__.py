"""Messages over a WebSocket for each party, opened by one Flower message.

On SuperNodes, every Flower message starts a process and both ends poll, which takes seconds. Here
Flower starts, authenticates and ends a run (the control plane). The exchanges travel over a stream
(the data plane):

1. `grid.StreamGrid`, at the label holder, listens with a key and certificate made for this run. To
   each party it sends a Flower message (`SessionOrder`) with the address, the certificate and a
   token.
2. The party (`session.serve`) connects outward, accepts only that certificate, and shows its token
   in a header of its call. A token serves once; the answer holds the token of the next call.
3. Each message of the run then travels down the stream, and its reply up. If a stream
   breaks, the label holder sends the unanswered message again on the next one. A party that has
   served it sends the same reply again. At most one message is in flight to a party.
4. The session ends when the label holder ends the call. The party then answers its Flower message,
   and its SuperNode keeps the ``Context.state``.

`frames` : a message is one of Flower's in Flower's own protobuf, in frames of 1 MiB at most.
"""
