"""Training drafters: from a target, a draft model and text to a drafter's file, and what it is worth on this machine.

Imported by `forerun train` alone; serving never needs it.
"""
