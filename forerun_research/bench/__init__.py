"""Benchmarks: Forerun beside other engines, on the same weights and prompts, in one process tree."""
