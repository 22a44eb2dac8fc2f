"""The executor of rank 0, which passes each call to the other ranks, and then to rank 0's own executor."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from espalier.engine.executor import Executor, LaunchHandle
from espalier.engine.launch_input import LaunchInput, RequestResult
from espalier.engine.masks import AskBeamMasks, BeamMasks, DraftGuideRows, HostTrees, NodeMasks
from espalier.engine.ranks import BeamAnswer, OtherRanks, RankFailed, ResumeRound, SendDecisions, SettleRound


class LeadExecutor:
    """An Executor (executor.py) for several ranks.  own_executor: this rank's executor.  `close` ends the other ranks.

    Every method raises RankFailed if a rank has failed."""

    def __init__(self, own_executor: Executor, ranks: OtherRanks) -> None:
        self.own_executor = own_executor
        self.runner = own_executor.runner
        self.captured_passes = own_executor.captured_passes
        self.runs_any_tree = own_executor.runs_any_tree
        self.ranks = ranks

    @property
    def failure(self) -> Exception | None:
        return self.ranks.failure

    def launch(self, launch_input: LaunchInput) -> LaunchHandle:
        with replace_by_rank_failure(self.ranks):
            number = self.ranks.launch(launch_input)
            make_handle = LeadStagedHandle if launch_input.is_staged else LeadLaunchHandle
            return make_handle(self.ranks, number, self.own_executor.launch(launch_input))

    def close(self) -> None:
        if self.ranks.failure is not None:
            # When the other ranks end, the collectives that this rank waits for fail.  This error is suppressed,
            # because it tells less than `failure`.
            self.ranks.end()
            with suppress(Exception):
                self.own_executor.close()
            return
        try:
            self.own_executor.close()
        finally:
            self.ranks.end()


class LeadLaunchHandle:
    def __init__(self, ranks: OtherRanks, launch_number: int, own_handle: LaunchHandle) -> None:
        self.ranks = ranks
        self.launch_number = launch_number
        self.own_handle = own_handle

    def wait(self) -> None:
        with replace_by_rank_failure(self.ranks):
            self.own_handle.wait()

    def result(self) -> list[RequestResult]:
        with replace_by_rank_failure(self.ranks):
            self.ranks.send(SendDecisions(self.launch_number))
            results = self.own_handle.result()
            self.ranks.require_equal(self.launch_number, results)
            return results


class LeadStagedHandle(LeadLaunchHandle):
    own_handle: Any  # a StagedRoundHandle

    def resume(self, guide: DraftGuideRows | None, ask_beam_masks: AskBeamMasks) -> None:
        """Starts the stages on all ranks.  Only rank 0 calls `ask_beam_masks`; it sends the answers to the others."""

        def ask_for_all(tokens: Tensor, ancestor_bits: Tensor) -> BeamMasks:
            answer = ask_beam_masks(tokens, ancestor_bits)
            self.ranks.send(BeamAnswer(answer))
            return answer

        with replace_by_rank_failure(self.ranks):
            self.ranks.send(ResumeRound(guide))
            self.own_handle.resume(guide, ask_for_all)

    def trees(self) -> HostTrees:
        with replace_by_rank_failure(self.ranks):
            return self.own_handle.trees()

    def settle(self, masks: NodeMasks) -> None:
        with replace_by_rank_failure(self.ranks):
            self.ranks.send(SettleRound(masks))
            self.own_handle.settle(masks)


@contextmanager
def replace_by_rank_failure(ranks: OtherRanks) -> Iterator[None]:
    """Replaces an error inside the block by the failure of another rank, if that failure caused the error."""
    try:
        yield
    except RankFailed:
        raise
    except Exception as error:
        raise ranks.failure_that_caused(error) from error
