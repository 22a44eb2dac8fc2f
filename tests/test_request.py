"""What a user may ask: filled in, held against its limits, counted."""

import re
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.errors import EspalierError
from espalier.grammar.spec import Grammar
from espalier.limits import MAX_BIASES, MAX_STOP_IDS, MAX_STOP_STRINGS
from espalier.request import (
    GENERATION_CONFIG_NAMES,
    Request,
    ResolvedParams,
    SamplingParams,
    SpeculationStats,
    check_prompt,
    sample_seed,
)
from espalier.startup.generation_config import generation_config

VOCAB = 100


def resolved(defaults=None, eos=(), **params):
    return SamplingParams(**params).resolve(defaults or {}, eos)


def test_unset_fields_come_from_the_generation_config_then_are_neutral():
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 7, "do_sample": True}
    params = resolved(generation, top_k=5)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.9, 5, 7)
    assert (params.min_p, params.repetition_penalty, params.n, params.speculation) == (0.0, 1.0, 1, True)
    assert resolved().temperature == 1.0


def test_do_sample_false_is_greedy_unless_the_user_says_otherwise():
    assert resolved({"do_sample": False, "temperature": 0.7}).temperature == 0.0
    assert resolved({"do_sample": False}, temperature=0.3).temperature == 0.3


@pytest.mark.parametrize("temperature", [0, 0.0, 5e-324, 1e-9, 9.9e-5])
def test_a_temperature_below_the_least_is_greedy(temperature):
    assert resolved(temperature=temperature).temperature == resolved({"temperature": temperature}).temperature == 0.0
    assert ResolvedParams(temperature=temperature).temperature == 0.0
    assert resolved(temperature=1e-4).temperature == 1e-4


def test_a_top_k_of_minus_one_is_off_as_zero_is():
    for params in (resolved(top_k=-1), resolved({"top_k": -1}), resolved({"top_k": 20}, top_k=-1), resolved(top_k=0)):
        params.validate(VOCAB)
        assert params.top_k == 0


def test_every_eos_id_stops_unless_ignored():
    assert resolved(eos=(2, 3), stop_token_ids=[5, 3]).stop_token_ids == (5, 3, 2)
    assert resolved(eos=(2, 3), stop_token_ids=[5], ignore_eos=True).stop_token_ids == (5,)


def test_a_stop_string_alone_is_a_list_of_one():
    assert resolved(stop="ab").stop == ("ab",)


REFUSED = [
    ({"temperature": -1}, "temperature=-1"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": -1e-9}, "temperature=-1e-09"),
    ({"temperature": 1e39}, "temperature=1e+39"),
    ({"temperature": 10**400}, "temperature=1000"),
    ({"logit_bias": {1: 10**400}}, "logit_bias[1]=1000"),
    ({"temperature": True}, "temperature=True"),
    ({"top_k": -2}, "top_k=-2"),
    ({"top_k": 1.5}, "top_k=1.5"),
    ({"top_p": 0}, "top_p=0"),
    ({"top_p": 1.1}, "top_p=1.1"),
    ({"min_p": 2}, "min_p=2"),
    ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ({"repetition_penalty": 1e39}, "repetition_penalty=1e+39"),
    ({"repetition_penalty": 1e-46}, "repetition_penalty=1e-46"),
    ({"top_k": 2**63}, f"top_k={2**63}"),
    ({"min_tokens": 2**63}, f"min_tokens={2**63}"),
    ({"logit_bias": {1: 1e39}}, "logit_bias[1]=1e+39"),
    ({"n": 10**9}, "n=1000000000"),
    ({"presence_penalty": 3}, "presence_penalty=3"),
    ({"frequency_penalty": -2.1}, "frequency_penalty=-2.1"),
    ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias token={VOCAB}"),
    ({"logit_bias": {1: float("inf")}}, "logit_bias[1]=inf"),
    ({"logit_bias": [1]}, "logit_bias=[1]"),
    ({"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)}, f"{MAX_BIASES + 1} entries"),
    ({"seed": -1}, "seed=-1"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": -3}, "use a whole number, 0 to 2147483647 (0 only with prompt_logprobs)"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5"),
    ({"stop": ""}, "stop=['']"),
    ({"stop": [1]}, "stop=[1]"),
    ({"stop": ["a", "b\udcff"]}, "stop contains a lone surrogate ('\\udcff' at character 1)"),
    ({"stop": 1}, "stop=1 is not supported; use a string or a list of strings"),
    ({"stop": ["x"] * (MAX_STOP_STRINGS + 1)}, f"stop with {MAX_STOP_STRINGS + 1} strings"),
    ({"stop_token_ids": [VOCAB]}, f"stop_token_ids entry={VOCAB}"),
    ({"stop_token_ids": "12"}, "stop_token_ids='12' is not supported; use a list of token ids"),
    ({"stop_token_ids": list(range(MAX_STOP_IDS + 1))}, f"{MAX_STOP_IDS + 1} stop token ids"),
    ({"logprobs": 21}, "logprobs=21"),
    ({"prompt_logprobs": 21, "max_tokens": 0}, "prompt_logprobs=21"),
    ({"prompt_logprobs": 1, "max_tokens": -1}, "max_tokens=-1"),
    ({"n": 0}, "n=0"),
    ({"speculation": 1}, "speculation=1"),
    ({"ignore_eos": "no"}, "ignore_eos='no'"),
    ({"skip_special_tokens": 0}, "skip_special_tokens=0"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output=1"),
    ({"max_draft_depth": -1}, "max_draft_depth=-1"),
]


@pytest.mark.parametrize(("params", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_bad_values_are_refused_in_one_line_with_a_remedy(params, named):
    with pytest.raises(EspalierError) as refused:
        resolved(**params).validate(VOCAB)
    message = str(refused.value)
    assert named in message
    assert any(remedy in message for remedy in ("use", "lower", "decode"))
    assert "\n" not in message


WHOLE_NUMBERS = [f.name for f in fields(SamplingParams) if f.type == int | None]


@pytest.mark.parametrize("value", [-1.0, 1.0, True, "1"], ids=repr)
@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_what_is_a_whole_number_takes_no_other_type_for_one(name, value):
    with pytest.raises(EspalierError, match=f"^{name}={value!r} is not supported; use a whole number"):
        resolved(**{name: value}).validate(VOCAB)
    if name in GENERATION_CONFIG_NAMES.values():
        [theirs] = [theirs for theirs, ours in GENERATION_CONFIG_NAMES.items() if ours == name]
        with pytest.raises(EspalierError, match=f"^{name}={value!r} is not supported"):
            resolved({theirs: value}).validate(VOCAB)


@pytest.mark.parametrize(
    "params",
    [
        {"max_draft_depth": 3, "speculation": False},
        {"prediction": "x", "speculation": False},
        {"prediction": [1], "max_draft_depth": 0},
    ],
    ids=repr,
)
def test_guesses_that_a_request_could_not_use_are_refused(params):
    SamplingParams(speculation=False, max_draft_depth=0, prediction=())
    name, other = params
    with pytest.raises(EspalierError, match=f"^{name} excludes {other}=.*; leave one of them out"):
        SamplingParams(**params)


@pytest.mark.parametrize("value", [1.0, True, "1", [1]], ids=repr)
def test_token_ids_are_whole_numbers_whatever_they_are_equal_to(value):
    for tokens in ([value], [1, value], [value, 1]):
        with pytest.raises(EspalierError, match=f"^stop_token_ids entry={re.escape(repr(value))} is not supported"):
            resolved(eos=(1,), stop_token_ids=tokens).validate(VOCAB)
        with pytest.raises(EspalierError, match=f"^prompt token id={re.escape(repr(value))} is not supported"):
            check_prompt(tokens, VOCAB, max_context=8)
    if not isinstance(value, list):
        with pytest.raises(EspalierError, match=f"^logit_bias token={value!r} is not supported"):
            resolved(logit_bias={value: 1.0}).validate(VOCAB)


@pytest.mark.parametrize(
    "params", [{"temperature": "hot"}, {"n": 0}, {"stop": b"a"}, {"stop_token_ids": [-1]}], ids=repr
)
def test_what_no_model_honours_is_refused_where_it_is_written(params):
    with pytest.raises(EspalierError, match=f"^{next(iter(params))}.* is not supported; use"):
        SamplingParams(**params)


def test_a_long_value_is_told_in_one_short_line():
    for value in ("x" * 10_000, torch.zeros(99, 99)):
        with pytest.raises(EspalierError) as refused:
            SamplingParams(temperature=value)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_good_values_pass():
    resolved(temperature=0.7, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.2, presence_penalty=-2).validate(
        VOCAB
    )
    resolved(logit_bias={1: -100}, seed=2**63 - 1, max_tokens=4, min_tokens=4, stop=["a", "bc"]).validate(VOCAB)
    resolved(prompt_logprobs=0, max_tokens=0).validate(VOCAB)
    resolved(prompt_logprobs=20, max_tokens=1).validate(VOCAB)
    resolved(stop_token_ids=[1], logprobs=20, n=3, speculation=False, max_draft_depth=0).validate(VOCAB)


def test_what_is_set_is_shown():
    assert repr(SamplingParams(temperature=0.0, stop="x")) == "SamplingParams(temperature=0.0, stop='x')"


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(EspalierError, match="stop_token_ids"):
        resolved(stop="x").validate(VOCAB, has_tokenizer=False)


def test_a_default_of_the_model_that_no_request_may_have_is_refused_with_its_file(tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": null, "top_k": -1, "max_new_tokens": 0.5}')
    with pytest.raises(EspalierError, match=f"{file}: max_new_tokens=0.5 is not .*; correct the file"):
        generation_config(tmp_path)


def test_a_schema_as_a_value_is_refused_with_what_makes_it_text():
    with pytest.raises(EspalierError, match=r"use a string \(JSON text: json\.dumps\)"):
        Grammar("json_schema", {"type": "object"})


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(EspalierError, match="'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1)
    with pytest.raises(EspalierError, match="SamplingParams has no 'max_new_tokens'; use max_tokens"):
        SamplingParams(max_new_tokens=1)
    with pytest.raises(EspalierError, match=r"Grammar has no 'regex'; use Grammar\(\"regex\", "):
        Grammar(regex="a")
    for theirs in ("structured_outputs", "guided_json", "regex"):
        with pytest.raises(EspalierError, match=rf"'{theirs}'; use grammar=espalier.Grammar\(...\)"):
            SamplingParams(**{theirs: "[ab]"})


@pytest.mark.parametrize(
    ("prompt", "named"), [([], "empty"), ([0] * 8, "8 tokens"), ([VOCAB], f"={VOCAB}"), ([-1], "=-1"), ([1.0], "=1.0")]
)
def test_prompts_that_cannot_start_are_refused(prompt, named):
    with pytest.raises(EspalierError, match=named):
        check_prompt(prompt, VOCAB, max_context=8)


def test_a_prompt_that_is_too_long_says_whose_limit_it_exceeds():
    with pytest.raises(
        EspalierError, match=r"length is 8 tokens .* \(the engine's max_context\); shorten .* or raise max_context$"
    ):
        check_prompt([0] * 8, VOCAB, max_context=8)


def test_a_prompt_may_leave_room_for_one_token():
    check_prompt([0] * 7, VOCAB, max_context=8)


def test_the_end_is_max_tokens_or_the_context():
    def end(**params):
        return Request("r", [1, 2, 3], resolved(**params), seed=0, arrival_index=0).max_num_tokens(max_context=10)

    assert (end(max_tokens=4), end(max_tokens=100), end()) == (7, 10, 10)
    assert end(max_tokens=0, prompt_logprobs=0) == 4, "a prompt pass picks a token, which has a place"


def test_opting_out_and_a_limit_of_ones_own_bound_the_depth():
    assert resolved(speculation=False).depth_limit(5) == 0
    assert resolved(max_draft_depth=2).depth_limit(5) == 2
    assert resolved(max_draft_depth=9).depth_limit(5) == 5
    assert resolved().depth_limit(5) == 5


def test_samples_have_seeds_of_their_own_and_the_first_keeps_its_requests():
    seeds = {sample_seed(seed, index) for seed in range(20) for index in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(7, 0) == 7


def counted(rounds):
    """Stats of (emitted, accepted, drafted, depth) rounds."""
    stats = SpeculationStats()
    for round in rounds:
        stats.add(*round)
    return stats


def test_stats_count_what_rounds_bring():
    stats = counted([(3, 2, 15, 5), (1, 0, 15, 5), (6, 5, 15, 5)])
    assert (stats.rounds, stats.emitted, stats.accepted, stats.drafted) == (3, 10, 7, 45)
    assert stats.histogram == [0, 1, 0, 1, 0, 0, 1]
    assert stats.acceptance_by_depth == [(3, 2), (2, 2), (2, 1), (1, 1), (1, 1)]
    assert stats.accept_length == pytest.approx(10 / 3)
    assert stats.as_dict()["rounds"] == 3


def test_a_round_cut_short_by_an_end_token_counts_only_drafted_tokens():
    assert counted([(2, 2, 15, 5)]).acceptance_by_depth == [(1, 1), (1, 1)]


def test_depths_beyond_a_requests_limit_were_not_tried():
    assert counted([(3, 2, 15, 2), (1, 0, 15, 0)]).acceptance_by_depth == [(1, 1), (1, 1)]


rounds = st.lists(st.integers(1, 7).map(lambda emitted: (emitted, emitted - 1, 15, 6)), max_size=20)


@given(rounds, rounds)
def test_merging_is_counting_all_at_once(one, other):
    merged = counted(one)
    merged.merge(counted(other))
    assert merged == counted(one + other)
    assert merged.accepted == merged.emitted - merged.rounds
