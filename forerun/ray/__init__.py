"""Replicas of the engine on Ray Serve, behind one front with the same endpoint, page and options as one process.

`front` has the socket: it checks keys and limits over all replicas, routes and forwards. `replica` is one engine with
the server's own application. Only `cluster`, `router` and `deploy` import Ray. The engine and the server know nothing
of all this.
"""
