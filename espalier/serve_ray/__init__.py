"""N engines behind Ray Serve, with the server's own front.  `app` is for a Serve config file (docs/deploy.md).

Deployments, routing's interface, autoscaling, health checks and rolling updates are Ray's.  Here is what is Espalier's:
what an engine replica does (replica.py), the front that asks replicas (ingress.py, pool.py), which replica a prompt
goes to (replica_chooser.py, router.py) and how many replicas the open tokens need (policy.py).
"""

from espalier.serve_ray.build import app

__all__ = ["app"]
