"""Engine replicas in Ray Serve, with Espalier's own API server.  `app` is for a Serve config (docs/deploy.md).

Ray provides deployments, the router's interface, autoscaling, health checks and rolling updates.  This package provides
the engine replica (replica.py), the API server that calls replicas (ingress.py, pool.py), the choice of a replica for a
prompt (replica_chooser.py, router.py), and an autoscaling policy by the number of tokens still to compute.
"""

from espalier.serve_ray.build import app

__all__ = ["app"]
