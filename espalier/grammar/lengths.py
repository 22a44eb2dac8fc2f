"""Bounds the length of what a regular expression allows.

Where several parts vary, they share the length.  So the result may allow fewer texts than the regex and the bounds do,
never more.
"""

from math import inf

from espalier.grammar.regex_tree import EMPTY, NOTHING, Alt, Chars, Node, Repeat, Seq, alt, repeat, seq

WORD = 10


def of_length(node: Node, least: int, most: int | None) -> Node:
    """The texts of `least` to `most` characters; NOTHING if none is found.  The node has no anchors."""
    if most is not None:
        node = _at_most(node, most)
    return node if node == NOTHING else _at_least(node, least)


def bounds(node: Node) -> tuple[int, float]:
    """The least and the most characters of a text; infinity for no most."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Seq):
        found = [bounds(part) for part in node.parts]
        return sum(low for low, _ in found), sum(high for _, high in found)
    if isinstance(node, Alt):
        found = [bounds(branch) for branch in node.branches]
        return min(low for low, _ in found), max(high for _, high in found)
    assert isinstance(node, Repeat)
    low, high = bounds(node.part)
    return low * node.least, high * (inf if node.most is None else node.most) if high else 0


def _at_most(node: Node, most: int) -> Node:
    low, high = bounds(node)
    if high <= most:
        return node
    if low > most or isinstance(node, Chars):
        return NOTHING
    if isinstance(node, Alt):
        return alt([_at_most(branch, most) for branch in node.branches])
    if isinstance(node, Seq):
        return _share(node.parts, most - low)
    assert isinstance(node, Repeat)
    low, high = bounds(node.part)
    if low == high:
        return repeat(node.part, node.least, most // low)
    limit = most // max(low, 1) if node.most is None else min(node.most, most // max(low, 1))
    # Words of about WORD characters.  Several shapes side by side would be a choice that xgrammar reads wrongly.
    size = int(min(high, max(low, WORD)))
    times = max(node.least, min(limit, most // size or 1))
    return repeat(_at_most(node.part, most // times), node.least, times) if times else EMPTY


def _share(parts: tuple[Node, ...], spare: int) -> Node:
    """The parts, which have `spare` characters above their least together."""
    made = []
    found = [bounds(part) for part in parts]
    for i, (part, (low, high)) in enumerate(zip(parts, found, strict=True)):
        # What those behind cannot use is for this one.
        behind = [above - below for below, above in found[i + 1 :] if above > below]
        share = max(spare // (1 + len(behind)), spare - sum(behind) if inf not in behind else 0)
        made.append(_at_most(part, low + int(share)) if high > low + share else part)
        spare -= int(min(bounds(made[-1])[1], low + share)) - low
    return seq(made)


def _at_least(node: Node, least: int) -> Node:
    """The texts of at least so many characters, all of which one part that varies must have."""
    low, high = bounds(node)
    if low >= least:
        return node
    if high < least:
        return NOTHING
    if isinstance(node, Alt):
        return alt([_at_least(branch, least) for branch in node.branches])
    if isinstance(node, Seq):
        return _raise(node.parts, least - low)
    assert isinstance(node, Repeat)
    part, (low, high) = node.part, bounds(node.part)
    if low == high:
        return repeat(part, -(-least // low), node.most)
    if low:
        times = -(-least // low)
        if node.most is None or times <= node.most:
            return repeat(part, times, node.most)
    times = node.least if node.most is None else node.most
    times = max(times, 1)
    return repeat(_at_least(part, -(-least // times)), times, node.most)


def _raise(parts: tuple[Node, ...], missing: int) -> Node:
    """The parts, `missing` characters above their least together: the one that may have the most takes the first."""
    made = list(parts)
    for i in sorted(range(len(parts)), key=lambda i: bounds(parts[i])[0] - bounds(parts[i])[1]):
        low, high = bounds(parts[i])
        more = int(min(missing, high - low))
        made[i] = _at_least(parts[i], low + more) if more else parts[i]
        missing -= more
    return seq(made)
