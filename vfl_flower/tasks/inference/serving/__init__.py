"""The online service at the label holder: requests for scores in, answers out.

Read from the outside in. `web` takes HTTP requests and puts their ids into a queue (`requests`).
`service` takes requests from the queue in batches, has the parties embed the rows (`embeddings`,
`parties`), and evaluates the top model. One thread runs `service`, another runs `web`. The party's
half is `vfl_flower.tasks.inference.party.scoring`, and `vfl_flower.transport.http` listens.
"""
