"""Faults of several ranks (planted.py).  With one rank they change nothing."""

from dataclasses import replace

from lab.faults.base import Fault


def _unsummed_product(original):
    return lambda shards, own: own


def _reversed_prompts(original):
    """The prompts keep their number of tokens, but the tokens are in another order."""

    def launch(follower, message):
        launch_input = message.launch_input
        inits = tuple(replace(each, tokens=each.tokens[::-1]) for each in launch_input.slot_inits)
        original(follower, message._replace(launch_input=replace(launch_input, slot_inits=inits)))

    return launch


def _experts_of_next_rank(original):
    """The last rank keeps its own experts."""

    def own_size(weights, experts):
        part = original(weights, experts)
        begin = min(part.end, part.size - len(part))
        return replace(part, begin=begin, end=begin + len(part))

    return own_size


def _scales_cut_along_rows(original):
    """For a matrix whose columns are divided, a rank gets as many scales, but those of other rows."""

    def stack(weights, names, stored, cuts=()):
        if not cuts or "scale" not in stored[0].suffix or len(names) > 1:
            return original(weights, names, stored, cuts)
        all_scales = original(weights, names, stored)
        own_shape = [each.stop - each.start for each in cuts[0]]
        if own_shape[0] < all_scales.shape[0] or own_shape[-1] == all_scales.shape[-1]:
            return all_scales[cuts[0]]
        rows = all_scales.shape[0] * own_shape[-1] // all_scales.shape[-1]
        return all_scales[weights.shards.rank * rows :][:rows].reshape(own_shape)

    return stack


RANK_FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "product-not-summed",
            "each rank goes on with its own part of a product that the ranks should sum",
            "espalier.shards.base:Shards.all_reduce",
            _unsummed_product,
        ),
        Fault(
            "prompt-of-another-launch",
            "a rank runs a launch with other prompts than rank 0",
            "espalier.engine.follow:FollowerRank._launch",
            _reversed_prompts,
        ),
        Fault(
            "experts-one-part-off",
            "each rank but the last holds the next rank's part of the experts",
            "espalier.models.layer_loading:_intermediate_part_of_rank",
            _experts_of_next_rank,
        ),
        Fault(
            "scales-across",
            "the scales of a matrix whose columns are divided are cut along its rows",
            "espalier.models.weights:Weights._cat_tensors",
            _scales_cut_along_rows,
        ),
    )
}
