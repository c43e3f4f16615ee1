"""Everything that decides how much to draft. The speculator asks `Controller` and nothing else in here.

A *free* drafter runs no model, a *paid* one does. In the order of a step:

- `governor`: may a batch of this size draft at all, and does this step skip it because the last ones drafted nothing?
- `Controller.should_run_free`: is a free drafter's own time worth it in this step?
- `depth`: how many rounds may a paid drafter run for each sequence? Planned before anything is drafted; now and then
  one round of a drafter that does not pay, to notice when it starts to.
- `stopping`: is one more round worth it? Evaluated while a draft grows.
- `selection`: which drafted nodes are verified?

All of them read two measurements: `cost` (seconds of a forward) and `acceptance` (how often each drafter's tokens are
accepted, over all requests and within one). The quantity made large is always the tokens per second of the whole batch.
Nothing here changes what is answered, only how long it takes.
"""
