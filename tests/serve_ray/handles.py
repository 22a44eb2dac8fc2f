"""What the pool uses of Ray Serve's DeploymentHandle, over replicas of this process.  It tests the pool, not Ray."""

import itertools

from espalier.serve_ray.replica_chooser import ReplicaChooser


class Lost(Exception):
    """A replica that is gone, as Ray would say it."""


class Stream:
    """One call's output.  cancelled: whether the caller cancelled it."""

    def __init__(self, parts):
        self.parts, self.cancelled = parts, False

    def __aiter__(self):
        return self.parts

    def cancel(self):
        self.cancelled = True


class Handle:
    """replicas: by name, each with the methods of EngineReplica; calls: (replica, route, Stream) so far."""

    def __init__(self, replicas):
        self.replicas = replicas
        self.chooser = ReplicaChooser()
        self.calls = []
        self.get_model_info = self._Method(self)
        self._requests = itertools.count()

    class _Method:
        def __init__(self, handle):
            self.handle = handle

        async def remote(self):
            return await next(iter(self.handle.replicas.values())).get_model_info()

    def options(self, method_name, stream):
        assert (method_name, stream) == ("generate", True)
        return self

    def remote(self, message, route):
        name = self.chooser.rank_replicas(route.prefix_hashes, self.replicas)[0]
        request = str(next(self._requests))
        self.chooser.record_sent(route.prefix_hashes, route.num_samples, name, request)

        async def iter_parts():
            try:
                async for each in self.replicas[name].generate(message, route):
                    yield each
            finally:
                self.chooser.record_ended(name, request)

        self.calls.append((name, route, Stream(iter_parts())))
        return self.calls[-1][2]

    def broadcast(self, method):
        return self._Broadcast(self, method)

    class _Broadcast:
        def __init__(self, handle, method):
            self.handle, self.method = handle, method

        async def results_async(self, timeout_s, return_exceptions):
            assert return_exceptions
            if not self.handle.replicas:
                raise Lost("there is no replica")
            found = []
            for each in self.handle.replicas.values():
                try:
                    found.append(await getattr(each, self.method)())
                except Lost as error:
                    found.append(error)
            return found
