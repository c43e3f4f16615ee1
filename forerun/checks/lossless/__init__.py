"""`forerun check lossless`, part by part; `run.py` puts the parts in order."""
