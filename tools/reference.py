# Copyright the mbridge_fsdp_ckpt developers. SPDX-License-Identifier: Apache-2.0
"""The API reference, made from signatures and docstrings:  python -m tools.reference  writes docs/reference.md.

The docstrings have Google's sections.  What a docstring puts between backticks is linked where the page has it.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import mbridge_fsdp_ckpt as package
from mbridge_fsdp_ckpt import errors, families
from mbridge_fsdp_ckpt.errors import CheckpointError
from mbridge_fsdp_ckpt.format.source import RankRecord

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"

SECTIONS: dict[str, tuple[str, ...]] = {
    "Save and load": ("save", "load", "load_weights", "load_optimizer"),
    "Save asynchronously": ("async_save", "finish_saves", "release_staging", "SaveHandle"),
    "What the calls return": ("SaveResult", "LoadResult", "RankRecord"),
    "What can be set": ("Settings",),
    "Megatron-Bridge": ("register", "unregister"),
    "Model families": tuple(families.__all__),
    "Errors": ("CheckpointError",),
}
CONSTANTS = {
    "FORMAT_NAME": f"`{package.FORMAT_NAME}`, what `ckpt_format` says for this format.",
    "STOCK_FORMAT": f"`{package.STOCK_FORMAT}`, the format of Megatron-FSDP's own checkpoints.",
    "__version__": "The version of this package.",
}

MEMBERS = {
    "SaveHandle": "directory skipped stalled state taken done error wait_until_taken wait result ended_on_all",
    "LoadResult": "warnings",
    "Family": "name version segments",
    "ParameterContext": "leaf ancestor child_name",
    "FamilyRegistry": "names families family origin register unregister claim that_would_claim check_installed",
}
"""What a class has for users besides the fields that it is made of."""

_LEADS = {
    "Save and load": "All ranks make each of these calls, with the same arguments unless it says otherwise.",
    "What the calls return": "Nobody else makes these. `RankRecord` is in `mbridge_fsdp_ckpt.format.source`.",
    "Model families": "In `mbridge_fsdp_ckpt.families`. [Add a model family](families.md) has an example.",
    "Errors": "In `mbridge_fsdp_ckpt.errors`. [Errors](errors.md) says what to do about each.",
}
_WIDTH = 100
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):\n((?:[ ]{4}.*\n|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^(\w[\w, ]*): ((?:.*\n)(?:[ ]{4}.*\n)*)", re.MULTILINE)
_MODULE = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])")
_QUOTED = re.compile(r"(?<!\[)`((\w+)(?:\.\w+)*)`")


@dataclass(frozen=True, slots=True)
class Doc:
    """A docstring, taken apart.

    Args:
        text: What stands outside of its sections.
        entries: By section, what it says by name; of `Returns`, everything under an empty name.
    """

    text: str
    entries: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, docstring: str | None) -> Doc:
        """Take one apart."""
        whole = inspect.cleandoc(docstring or "").replace(".  ", ". ") + "\n"
        found: dict[str, dict[str, str]] = {}
        for name, body in _SECTION.findall(whole):
            body = textwrap.dedent(body).strip("\n") + "\n"
            pairs = [("", body)] if name in ("Returns", "Yields") else _ENTRY.findall(body)
            found[name] = {key: " ".join(text.split()) for key, text in pairs}
        return cls(_SECTION.sub("", whole).strip(), found)

    @property
    def fields(self) -> dict[str, str]:
        """Arguments, or what an object has."""
        return self.entries.get("Args", {}) | self.entries.get("Attributes", {})


def homes() -> dict[str, Any]:
    """Every object of the page by its name."""
    named = {name: getattr(package, name) for name in package.__all__ if name not in CONSTANTS}
    named |= {name: getattr(families, name) for name in families.__all__}
    return named | {"RankRecord": RankRecord, "CheckpointError": CheckpointError}


def named_errors() -> list[type[BaseException]]:
    """Every error besides the base of all, in the order of the file."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return [kind for kind in kinds if kind is not CheckpointError and kind.__module__ == errors.__name__]


def annotation(kind: Any) -> str:
    """A type as a reader writes it, without the modules of its parts."""
    return _MODULE.sub("", inspect.formatannotation(kind))


def parameter(of: inspect.Parameter) -> str:
    """One parameter with its type and default."""
    kind = "" if of.annotation is of.empty else f": {annotation(of.annotation)}"
    default = "" if of.default is of.empty or repr(of.default) == "<factory>" else f" = {of.default!r}"
    return f"{of.name}{kind}{default}"


def signature(name: str, function: Callable[..., Any]) -> str:
    """A call as a block of code: in one line, or one for each parameter."""
    called = inspect.signature(function, eval_str=True)
    parts: list[str] = []
    for each in called.parameters.values():
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(parameter(each))
    returns = "" if called.return_annotation is called.empty else f" -> {annotation(called.return_annotation)}"
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) > _WIDTH:
        line = "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){returns}"])
    return f"```python\n{line}\n```"


def attributes(kind: type) -> dict[str, tuple[str, str]]:
    """What a class assigns and describes in a string behind that: the type of a constant, and the description."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))):
        for one, after in pairwise(node.body if isinstance(node, ast.FunctionDef) else ()):
            match one, after:
                case ast.Assign([ast.Attribute(attr=name)], value), ast.Expr(ast.Constant(str(text))):
                    typed = type(value.value).__name__ if isinstance(value, ast.Constant) else ""
                    found[name] = typed, " ".join(text.split())
    return found


def bullet(name: str, kind: str, text: str) -> str:
    """One line of a list."""
    typed = f" `{kind}`" if kind else ""
    return f"- **`{name}`**{typed}: {text}" if text else f"- **`{name}`**{typed}"


def sections(doc: Doc) -> Iterator[str]:
    """What a docstring says besides arguments."""
    for text in doc.entries.get("Returns", {}).values():
        yield f"*Returns*: {text}"
    raised = doc.entries.get("Raises", {})
    if raised:
        listed = [f"- {', '.join(f'`{one}`' for one in name.split(', '))}: {text}" for name, text in raised.items()]
        yield "*Raises*:\n\n" + "\n".join(listed)


def of_function(name: str, function: Callable[..., Any]) -> Iterator[str]:
    """A function's part of the page."""
    doc = Doc.of(function.__doc__)
    yield signature(name, function)
    yield doc.text
    if doc.fields:
        yield "\n".join(bullet(argument, "", text) for argument, text in doc.fields.items())
    yield from sections(doc)


def of_class(name: str, kind: type) -> Iterator[str]:
    """A class's part of the page: what it is made of, then its members."""
    doc, shown = Doc.of(kind.__doc__), MEMBERS.get(name, "").split()
    made_of = inspect.signature(kind, eval_str=True).parameters if "Attributes" not in doc.entries else {}
    hints = {key: annotation(hint) for key, hint in get_type_hints(kind).items()}
    types = hints | {key: parameter(of).partition(": ")[2] for key, of in made_of.items()}
    yield doc.text
    fields = {key: text for key, text in doc.fields.items() if name != "SaveHandle" or key in shown}
    lines = [bullet(key, types.get(key, ""), text) for key, text in fields.items()]
    described = attributes(kind)
    lines += [bullet(key, *described[key]) for key in shown if key in described]
    lines += [
        bullet(key, annotation(inspect.signature(member.fget, eval_str=True).return_annotation), _said(member))
        for key in shown
        if isinstance(member := inspect.getattr_static(kind, key, None), property) and member.fget is not None
    ]
    if lines:
        yield "\n".join(lines)
    for key in shown:
        if inspect.isfunction(member := inspect.getattr_static(kind, key, None)):
            yield from of_function(f"{name}.{key}", member)
    yield from sections(doc)


def _said(member: property) -> str:
    doc = Doc.of(member.__doc__)
    raised = "; ".join(f"`{name}`: {text}" for name, text in doc.entries.get("Raises", {}).items())
    return " ".join(doc.text.split()) + (f" Raises {raised}" if raised else "")


def _table_of_errors() -> str:
    rows = [f"| `{kind.__name__}` | {' '.join(Doc.of(kind.__doc__).text.split())} |" for kind in named_errors()]
    return "\n".join(["| error | what it means |", "| --- | --- |", *rows])


def _linked(text: str) -> str:
    """Link what stands between backticks in prose and is on the page; code blocks, headings and names stay."""
    anchors = {name: f"#{name.lower()}" for name in homes()} | {kind.__name__: "#errors" for kind in named_errors()}

    def link(match: re.Match[str]) -> str:
        return f"[{match[0]}]({anchors[match[2]]})" if match[2] in anchors else match[0]

    parts = re.split(r"(```[^`]*```|^#[^\n]*|^- \*\*`\w+`\*\*(?: `[^`\n]*`)?|^\| `\w+`)", text, flags=re.MULTILINE)
    return "".join(part if number % 2 else _QUOTED.sub(link, part) for number, part in enumerate(parts))


def page() -> str:
    """The whole page."""
    known = homes()
    blocks = [
        "# API reference",
        "<!-- made from docstrings by python -m tools.reference -->",
        "Everything here is imported from `mbridge_fsdp_ckpt` unless it says otherwise. That import loads neither "
        "torch nor Megatron; the first use of a name does.",
    ]
    for title, names in SECTIONS.items():
        blocks += [f"## {title}", *([_LEADS[title]] if title in _LEADS else [])]
        for name in names:
            described = of_class if isinstance(known[name], type) else of_function
            blocks += [f"### `{name}`", *described(name, known[name])]
    blocks.append(_table_of_errors())
    blocks += ["## Constants", "\n".join(f"- **`{name}`**: {text}" for name, text in CONSTANTS.items())]
    return _linked("\n\n".join(block for block in blocks if block)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
