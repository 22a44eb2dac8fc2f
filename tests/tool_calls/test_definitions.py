"""Tools are checked before anything runs, and each error says which one is wrong."""

import pytest

from espalier.errors import EspalierError
from espalier.tool_calls.definitions import MAX_SCHEMA_CHARS, MAX_TOOLS, checked_tools

F = {"type": "function", "function": {"name": "f"}}


def function(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


def parameters(**schema):
    return function(parameters=schema)


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ("f", "tools='f' is not supported; use a list"),
        ([F["function"]], r"tools\[0\]=.* is not supported; use {\"type\": \"function\""),
        ([F, {"type": "web_search"}], r"tools\[1\]=.* is not supported; use"),
        ([{**F, "strict": True}], r"tools\[0\] has no 'strict'; use one of type, function"),
        ([function(paramters={})], r"tools\[0\].function has no 'paramters'; did you mean 'parameters'"),
        ([function(name="a b")], r"tools\[0\].function.name='a b' is not supported; use 1 to 128"),
        ([function(name="")], r"tools\[0\].function.name='' is not supported"),
        ([function(name="x" * 129)], r"tools\[0\].function.name='x"),
        ([function(name=None)], r"tools\[0\].function.name=None is not supported"),
        ([F, F], r"tools\[1\].function.name='f' is the name of an earlier tool"),
        ([function(description=1)], r"tools\[0\].function.description=1 is not supported; use text"),
        ([function(strict="yes")], r"tools\[0\].function.strict='yes' is not supported; use true or false"),
        ([function(parameters=[])], r"tools\[0\].function.parameters=\[\] is not supported; use a JSON schema"),
        ([parameters(type="array")], r"tools\[0\].function.parameters.type='array' is not supported; use 'object'"),
        (
            [parameters(properties=[])],
            r"tools\[0\].function.parameters.properties=\[\] is not supported; use an object",
        ),
        ([parameters(properties={"a": 1})], r"tools\[0\].function.parameters.properties.a=1 is not supported"),
        ([parameters(required="a")], r"tools\[0\].function.parameters.required='a' is not supported; use a list"),
        ([parameters(required=[1])], r"tools\[0\].function.parameters.required=1 is not supported"),
        ([parameters(description="x" * MAX_SCHEMA_CHARS)], r"parameters has \d+ characters, which is not supported"),
        ([parameters(default={1, 2})], r"tools\[0\].function.parameters is not JSON"),
        ([F] * (MAX_TOOLS + 1), "tools with more than 1024 entries is not supported"),
    ],
)
def test_a_wrong_tool_is_named(tools, said):
    with pytest.raises(EspalierError, match=f"{said}") as caught:
        checked_tools(tools)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("tools")


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        ([F], "any", "^tool_choice='any' is not supported; use auto, none, required or {"),
        ([F], {"type": "allowed_tools"}, "^tool_choice={'type': 'allowed_tools'} is not supported"),
        ([F], {"type": "function"}, "^tool_choice=.* is not supported"),
        ([F], {"type": "function", "function": {"name": "g"}}, "^tool_choice='g' is not the name of a tool; .* f"),
        ([], {"type": "function", "function": {"name": "g"}}, "^tool_choice='g' is not the name of a tool; .* none"),
        ([], "required", "^tool_choice='required' needs tools"),
    ],
)
def test_a_wrong_choice_is_named(tools, choice, said):
    with pytest.raises(EspalierError, match=said):
        checked_tools(tools, choice)
    with pytest.raises(EspalierError, match=r"^parallel_tool_calls='no' is not supported"):
        checked_tools([F], None, "no")


def test_what_is_chosen_may_be_called():
    g = function(name="g")
    names = [
        [each["name"] for each in checked_tools([F, g], choice).callable_functions]
        for choice in (None, "auto", "required", "none", {"type": "function", "function": {"name": "g"}})
    ]
    assert names == [["f", "g"], ["f", "g"], ["f", "g"], [], ["g"]]
    # The Responses API names it without `function`.
    assert checked_tools([F, g], {"type": "function", "name": "g"}).is_forced
    assert [checked_tools([F], each).is_forced for each in (None, "auto", "none", "required")] == [False] * 3 + [True]
    # A tool may have the name of a choice.
    auto = checked_tools([function(name="auto"), g], {"type": "function", "function": {"name": "auto"}})
    assert auto.is_forced and [each["name"] for each in auto.callable_functions] == ["auto"]
    assert checked_tools(None).callable_functions == checked_tools([], "auto").callable_functions == []
