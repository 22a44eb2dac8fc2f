"""Engine replicas in Ray Serve, with Espalier's own API server.  A Serve config file imports `app` (docs/deploy.md).

Ray provides deployments, the router's interface, autoscaling, health checks and rolling updates.  This package provides
the engine replica (replica.py), the API server that calls replicas (ingress.py, pool.py), the choice of a replica for a
prompt (replica_chooser.py, router.py), and an autoscaling policy that counts the tokens still to compute.
"""

from espalier.serve_ray.build import app

__all__ = ["app"]
