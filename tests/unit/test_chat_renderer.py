"""Chat templates of somebody else render within limits, in a process that may end without harm."""

import os
from pathlib import Path
from typing import Any

import pytest

from collapipe.chat_renderer import ChatRenderer
from collapipe.errors import InvalidInputError

_MANY, _END = "{% for _ in range(99999) %}", "{% endfor %}"
CASES = {
    "loops": _MANY * 3 + _END * 3,
    "power": "{% set n = 9 + messages | length %}{{ n ** (n ** n) }}",
    "recursion": "{{ forever() }}",
    "multiplication": "{% set n = 9 + messages | length %}{{ 'a' * n ** n }}",
    "large text": "{% set n = 5 * messages | length %}{{ 'a' * n * 2 ** 20 }}",
    "doubling": "{% set n = namespace(a='a') %}{% for _ in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "filter": "{{ 'a' | center(10 ** 10) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ namespace.__init__.__globals__ }}",
    "system": "{{ cycler.__init__.__globals__.os.system('id') }}",
    "change": "{{ messages.append(1) }}",
    "division": "{{ 1 / 0 }}",
    "file": "{% include '/etc/passwd' %}",
    "long error": "{{ raise_exception('a' * 10 ** 7) }}",
}
TEMPLATE = (
    "{% macro forever() %}{{ forever() }}{% endmacro %}"
    + "".join(
        f"{{% if messages[0].content == '{name}' %}}{case}{{% endif %}}"
        for name, case in CASES.items()
    )
    + "{% for each in messages %}{{ bos_token }}{{ each.content }}{% endfor %}"
)


def chat(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(TEMPLATE, {"bos_token": "<s>"}, 1 << 22, seconds=3)


@pytest.mark.parametrize("name", CASES)
def test_template_that_takes_time_or_memory_or_leaves_its_sandbox_is_refused(
    renderer: ChatRenderer, name: str
) -> None:
    with pytest.raises(InvalidInputError) as raised:
        renderer.render([(chat(name), True)])
    assert 0 < len(str(raised.value)) < 1000
    # Another chat gets another process if this one has ended.
    assert renderer.render([(chat("a"), True), (chat("b") * 2, False)]) == ["<s>a", "<s>b<s>b"]


def test_template_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="[Ee]xpected"):
        ChatRenderer("{% if %}", {}, 99).render([(chat("a"), True)])


def test_process_that_has_ended_leaves_no_open_pipes() -> None:
    renderer = ChatRenderer("{{ messages[0].content }}", {}, 99)
    numbers = []
    for _ in range(3):
        renderer.render([(chat("a"), False)])
        numbers.append(len(os.listdir("/proc/self/fd")))
        assert renderer._process is not None
        renderer._process.kill()
        renderer._process.wait()
    assert len(set(numbers)) == 1, numbers


def test_modules_in_the_directory_of_the_service_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("jinja2", "tokenizers"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    assert ChatRenderer("{{ messages[0].content }}", {}, 99).render([(chat("a"), False)]) == ["a"]
    assert not (tmp_path / "ran").exists()
