"""Several models behind one server: a front for each, and what all of them share."""

from collections.abc import Sequence

from espalier.errors import EspalierError
from espalier.server.bodies import BodyLimits
from espalier.server.body_reader import BodyReader
from espalier.server.errors import ApiError
from espalier.server.front import Front, no_model
from espalier.server.metrics import Metrics


class Fronts:
    """fronts: at least one, each with the same metrics.  Has what the endpoints ask of a Front.

    A body is read before its model is known, so its limits are those of the largest model.  The front of its model then
    checks it against its own.
    """

    def __init__(self, fronts: Sequence[Front], metrics: Metrics):
        self.fronts = fronts
        self.metrics = metrics
        self.names = tuple(name for front in fronts for name in front.names)
        self._by_name = {name: front for front in fronts for name in front.names}
        if twice := [name for name in self._by_name if self.names.count(name) > 1]:
            raise EspalierError(f"two models are served as {twice[0]!r}; give them different names (served_model_name)")
        limits = [front.bodies.limits for front in fronts]
        self.bodies = BodyReader(
            BodyLimits(
                max(each.vocab_size for each in limits),
                max(each.max_context for each in limits),
                max(each.prompts for each in limits),
                max(each.tokens for each in limits),
                max(limits, key=lambda each: each.max_context).max_position,
            )
        )

    def of(self, model: str | None) -> Front:
        """The front of a request's model.  Raises ApiError."""
        if model is None and len(self.fronts) > 1:
            raise ApiError(400, f"model is missing; use one of {', '.join(self.names)}", "model")
        if model is None:
            return self.fronts[0]
        if model not in self._by_name:
            raise no_model(model, self.names)
        return self._by_name[model]

    @property
    def status(self) -> str:
        """ "ok", or the status of a model that is not."""
        return next((front.status for front in self.fronts if front.status != "ok"), "ok")

    @property
    def why(self) -> str:
        return next((front.why for front in self.fronts if front.why), "")

    async def close(self) -> None:
        for front in self.fronts:
            await front.close()
        await self.bodies.close()
