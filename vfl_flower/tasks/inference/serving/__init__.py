"""The online service at the label holder: requests for scores in, answers out.

`web` takes HTTP requests and puts their ids into a queue (`requests`). In another thread, `service`
takes them in batches, has the parties embed the rows (`embeddings`, `parties`), and evaluates the
top model. The party's half is `vfl_flower.tasks.inference.party.scoring`.
"""
