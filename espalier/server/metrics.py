"""Prometheus metrics: the API server's own metrics, and the values in the last report of each engine process."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from espalier.server.protocol import Engines, EngineStats
from espalier.stats import LearnStats, SpeculationStats

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
MetricFamily = CounterMetricFamily | GaugeMetricFamily
LabelledValue = tuple[object, float]
ABORT_BUCKETS = (1, 2, 3, 4, 8)


class Metrics:
    """The metrics of one server.  Each server has its own Prometheus registry, because one process may have several
    servers.  engines: one Engines object for each model."""

    def __init__(self, engines: Sequence[Engines]):
        self.started_at = time.time()
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engines))
        self.responses = self._counter("http_requests", "HTTP requests answered", "path", "status")
        self.disconnects = self._counter("disconnects", "requests whose client disconnected before the end")
        self.timeouts = self._counter("timeouts", "requests that took longer than --request-timeout")
        self.stalled_readers = self._counter("stalled_readers", "connections closed because the client did not read")
        self.stalled_senders = self._counter("stalled_senders", "connections closed because no whole request arrived")
        self.stream_errors = self._counter("stream_errors", "streams that ended with an error event", "type")
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens of requests that ended")
        self.cached_tokens = self._counter(
            "prompt_cached_tokens", "prompt tokens of requests that ended, found in the prefix cache"
        )
        self.generated_tokens = SingleThreadCounter("generated_tokens", "output tokens")
        self.registry.register(self.generated_tokens)
        self.finished_samples = self._counter("finished_samples", "samples that ended, by finish_reason", "reason")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "from arrival to a prompt's first token", LATENCY_BUCKETS
        )
        self.inter_token_time = WeightedHistogram(
            "inter_token_seconds", "time between tokens; the tokens of one round share its time equally", TOKEN_BUCKETS
        )
        self.registry.register(self.inter_token_time)
        self.duration = self._histogram(
            "request_seconds", "from arrival to the end of a generating request", LATENCY_BUCKETS
        )

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"espalier_{name}", documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"espalier_{name}", documentation, buckets=tuple(buckets), registry=self.registry)

    def exposition_text(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


@dataclass(eq=False)
class SingleThreadCounter(Collector):
    """A counter without a lock, for use by one thread.  The counter of prometheus_client takes a lock at each call."""

    name: str
    documentation: str
    count: int = 0

    def collect(self) -> Iterator[Metric]:
        yield _counter(self.name, self.documentation, self.count)


class WeightedHistogram(Collector):
    """A histogram that counts many equal values in one call.  upper_limits: of the buckets, ascending."""

    def __init__(self, name: str, documentation: str, upper_limits: Sequence[float]):
        self.name = name
        self.documentation = documentation
        self.upper_limits = upper_limits
        self.counts = [0] * (len(upper_limits) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int) -> None:
        """Count `count` occurrences of a value."""
        self.counts[bisect_left(self.upper_limits, value)] += count
        self.total += value * count

    def collect(self) -> Iterator[Metric]:
        yield _histogram(self.name, self.documentation, self.upper_limits, self.counts, self.total)


@dataclass(eq=False)
class EngineCollector(Collector):
    """Makes metrics from the engines' last reports when /metrics is read.  A restarted engine counts from 0 again."""

    engines: Sequence[Engines]

    def collect(self) -> Iterator[Metric]:
        open_samples = sum(each.open_samples for each in self.engines)
        yield _gauge("open_samples", "samples that are queued or running, counted in the API server", open_samples)
        families: dict[str, Metric] = {}
        for stats in (each for engines in self.engines for each in engines.engine_stats()):
            for metric in _engine_metrics(stats):
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples += [s._replace(labels={**stats.labels, **s.labels}) for s in metric.samples]
        yield from families.values()


def _engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    report = stats.report
    pages = (("free", report.pages_free), ("cached", report.pages_cached), ("owned", report.pages_owned))
    yield _gauge("engine_up", "1 while the engine process is ready", stats.is_ready)
    yield _counter("engine_restarts", "engine processes started after the first", stats.num_restarts)
    yield _gauge("waiting_requests", "samples queued in the engine", report.num_waiting)
    yield _gauge("running_requests", "samples in a slot", report.num_running)
    yield _labelled_metric(GaugeMetricFamily, "pages", "pages of the cache", "state", pages)
    yield _counter("preemptions", "samples put back into the queue because pages ran out", report.num_preempted)
    yield _counter("harvests", "engine steps", report.num_steps)
    yield from _speculation_metrics(report.speculation)
    yield _gauge("acceptance_alarm", "1 if almost no draft token is accepted: check the draft", report.low_acceptance)
    rounds = CounterMetricFamily("espalier_rounds", "rounds by batch bucket", labels=["bucket", "run"])
    for bucket, graph, count in report.rounds_by_bucket:
        rounds.add_metric([str(bucket), "graph" if graph else "eager"], count)
    yield rounds
    documentation = "rounds by tree: steps,topk,num_draft_tokens"
    yield _labelled_metric(CounterMetricFamily, "rounds_by_tree", documentation, "tree", report.rounds_by_tree)
    yield _counter("tree_changes", "times that another tree was chosen", report.tree_changes)
    yield from _source_metrics(report.by_source)
    yield _abort_steps_metric(stats.abort_steps)
    if report.learn_stats is not None:
        yield from _learning_metrics(report.learn_stats)


def _speculation_metrics(totals: SpeculationStats) -> Iterator[Metric]:
    yield _gauge("accept_length", "mean accept length since the start; 1.0 is plain decoding", totals.accept_length)
    yield _counter("drafted_tokens", "draft tokens verified", totals.drafted)
    yield _counter("accepted_tokens", "draft tokens accepted", totals.accepted)
    for name, documentation, label, counts in (
        ("rounds_by_accept_length", "rounds by accept length", "length", enumerate(totals.histogram)),
        ("depth_tried", "rounds in which a depth was tried", "depth", enumerate(totals.rounds_tried_by_depth, 1)),
        (
            "depth_accepted",
            "rounds in which a depth was accepted",
            "depth",
            enumerate(totals.rounds_accepted_by_depth, 1),
        ),
    ):
        yield _labelled_metric(CounterMetricFamily, name, documentation, label, counts)


def _learning_metrics(stats: LearnStats) -> Iterator[Metric]:
    yield _counter("learn_swaps", "drafts swapped in", stats.swaps)
    yield _counter("learn_trainings", "trainings of the draft that ended", stats.trainings)
    yield _counter("learn_failures", "trainings that failed, and failures to write", stats.failures)
    lengths = (
        ("given", stats.startup_accept_length),
        ("served", stats.served_accept_length),
        ("trained", stats.trained_accept_length),
    )
    documentation = "accept length on held-back traffic, at the last training"
    yield _labelled_metric(GaugeMetricFamily, "learn_accept_length", documentation, "draft", lengths)
    yield _counter("learn_texts", "texts kept", stats.texts)
    yield _gauge("learn_bytes", "size of the kept sample", stats.bytes)


def _source_metrics(by_source: Mapping[str, Sequence[float]]) -> Iterator[Metric]:
    """Yields the metrics of each source of draft tokens.  by_source: EngineReport.by_source."""
    documentation = ("draft tokens verified", "of these, accepted by their scores", "of these, accepted")
    for i, (name, text) in enumerate(zip(("rows", "rows_expected", "rows_accepted"), documentation, strict=True)):
        rows = [(source, counts[i]) for source, counts in by_source.items()]
        description = f"{text}, where scores are compared"
        yield _labelled_metric(CounterMetricFamily, f"{name}_by_source", description, "source", rows)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(f"espalier_{name}", documentation, value=float(value))


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(f"espalier_{name}", documentation, value=value)


def _labelled_metric(
    family_type: type[MetricFamily], name: str, documentation: str, label: str, values: Iterable[LabelledValue]
) -> Metric:
    """Returns a metric with one label.  label: its name.  values: pairs (the label's value, the metric's value)."""
    family = family_type(f"espalier_{name}", documentation, labels=[label])
    for label_value, value in values:
        family.add_metric([str(label_value)], value)
    return family


def _abort_steps_metric(num_aborts_by_steps: Mapping[int, int]) -> Metric:
    counts = [0] * (len(ABORT_BUCKETS) + 1)
    for num_steps, num_aborts in num_aborts_by_steps.items():
        counts[bisect_left(ABORT_BUCKETS, num_steps)] += num_aborts
    documentation = "engine steps from an abort's arrival to the release of its pages"
    total = sum(num_steps * num_aborts for num_steps, num_aborts in num_aborts_by_steps.items())
    return _histogram("abort_steps", documentation, ABORT_BUCKETS, counts, total)


def _histogram(name: str, documentation: str, limits: Sequence[float], counts: Sequence[int], total: float) -> Metric:
    """Returns a histogram metric.  limits: the upper limit of each bucket except the last, which has no limit.  counts:
    the number of values in each bucket.  total: the sum of all values."""
    labels = [*(str(float(limit)) for limit in limits), "+Inf"]
    buckets = list(zip(labels, accumulate(counts), strict=True))
    return HistogramMetricFamily(f"espalier_{name}", documentation, buckets=buckets, sum_value=total)
