"""Everything that decides how much to draft. The speculator asks `Controller` and nothing else in here.

A *free* drafter runs no model, a *paid* one does. A step has one decision, plain decoding or drafts, by one measure:
the tokens per second of the whole batch. `controller` makes it, in the terms of `decision`, from

- `cost`: seconds of a forward by its rows, of the target and of paid drafters; `host`: the host's own time beside them,
- `acceptance`: how often each drafter's tokens are accepted, over all requests, by kind of prompt (`kinds`) and within
  one, with lower bounds: doubt is on the side of plain decoding,
- `depth`: how many rounds of a paid drafter pay for each sequence; `selection`: which drafted nodes are verified.

`cost_cache` keeps what was measured and learnt between starts. Nothing here changes what is answered, only how long it
takes.
"""
