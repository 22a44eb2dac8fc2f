"""The one exception that users see for what they asked: a sentence naming the value, what is supported and the remedy."""


class EspalierError(ValueError):
    """Bad input or an unsupported combination, refused by name before anything is lost."""
