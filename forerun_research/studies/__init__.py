"""Measurements of the engine and of models."""
