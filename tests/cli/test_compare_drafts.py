"""The table of compared drafts: what it says of plain decoding's tokens."""

from scripts.compare_drafts import Row, tables


def row(name, *texts):
    return Row(name, (2, 1, 3), seconds=[1.0], texts=[list(text) for text in texts])


def same_texts(of, plain):
    [(_, [header, line])] = tables([of.figures(0.0, plain)])
    return dict(zip(header, line, strict=True))["same texts"]


def test_tokens_are_compared_with_plain_decoding_alone():
    ngram = row("ngram", (1, 2), (3, 4))
    assert same_texts(ngram, row("plain", (1, 2), (3, 5))) == "1 of 2"
    # Without it nothing is compared.
    assert same_texts(ngram, None) == ""
