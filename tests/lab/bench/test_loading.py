"""`bench loading`: what is counted, and that a short peak of memory is seen."""

import time

import torch

from lab.bench.loading import _sample_until_end, measure_loading, process_bytes
from tests.builders import make_target

MIB = 2**20


def test_sizes_are_those_of_the_files_and_of_the_weights(tmp_path):
    path = make_target(tmp_path / "target", "llama")
    found = measure_loading(path, torch.bfloat16, torch.device("cpu"))
    size = (path / "model.safetensors").stat().st_size
    # Stored in float64, and a header.
    assert found.file_bytes == size and 0 < size - 4 * found.weights_bytes < 20_000
    assert found.read_seconds > 0 and found.load_seconds > 0 and found.gpu_bytes is None


def test_memory_that_is_free_again_at_the_end_is_seen():
    with _sample_until_end(process_bytes) as samples:
        held = torch.ones(64 * MIB, dtype=torch.uint8)
        count = len(samples)
        for _ in range(1000):
            time.sleep(0.01)
            if len(samples) > count + 2:
                break
        del held
    assert max(samples) - samples[0] > 60 * MIB
