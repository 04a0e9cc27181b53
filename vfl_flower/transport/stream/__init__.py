"""Messages over a gRPC stream for each party, which one long-lived Flower message opens.

On SuperNodes every Flower message starts a process and both ends poll, which takes seconds. Here
Flower stays what starts, authenticates and ends a run (the control plane), and the exchanges go
through a stream (the data plane):

1. `grid.StreamGrid`, at the label holder, listens with a key and certificate made for this run. To
   each party it sends a Flower message (`SessionOrder`) with the address, the certificate and a
   token.
2. The party (`session.serve`) connects outward, accepts that certificate only, and shows its token
   in the call's metadata. A token serves once; the answer to it holds the one to reconnect with.
3. Each message of the run is then a frame down the stream, its reply a frame up. What was not
   answered when a stream broke is sent again on the next; a party that has served it sends the
   same reply again. One message at most is in flight to a party, so nothing piles up.
4. The session ends when the label holder ends the call. The party then answers its Flower message,
   and so its SuperNode keeps its ``Context.state``.

`frames` : a frame is a Flower message in Flower's own protobuf, in chunks if it is long.
"""
