"""Says as options, and as fields of the model's file, what the library says as fields of its records."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from pymesh3d.config import ModelConfig
from pymesh3d.errors import ConfigError

# Field -> option; the others have the same name.
RENAMED = {"global_batch": "global_batch_size", "micro_batch": "micro_batch_size", "virtual": "virtual_pp"}
MODEL_FIELDS = {field.name for field in dataclasses.fields(ModelConfig)}
JSON_WORDS = {"True": "true", "False": "false", "None": "null"}
NONE = {"max_norm": "0"}  # how the command line says None, where there is a way
SWITCHES = {"zero_once_a_step"}  # options with an opposite, which begins with --no-

# A quoted text, which stays as it is, or a name with the value that may follow it: `name`, `name=value`, `name='a value'`.
QUOTES = "'\""
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_NAMED = re.compile(rf"(?<!\w)(?:{_QUOTED})|(?<![\w./-])(?P<name>[a-z_]+)(?![\w./-])(?:=(?P<value>{_QUOTED}|[^\s,:;()]*[^\s,:;().]))?")


def fields_of(record: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record that can be given as options, with what was given."""
    names = {field.name: RENAMED.get(field.name, field.name) for field in dataclasses.fields(record)}
    return {field: options[name] for field, name in names.items() if name in options}


def option_of(field: str) -> str:
    """How the command line spells a field."""
    return f"--{RENAMED.get(field, field).replace('_', '-')}"


def as_typed(error: ConfigError, options: Mapping[str, Any]) -> str:
    """The text of an error in the words of the command line, which has the options `options`."""
    if error.given.startswith("--"):
        return str(error)
    given, rule, instead = (_NAMED.sub(lambda found: _spelled(found, options), text) for text in (error.given, error.rule, error.instead))
    of_model = any(found["value"] and found["name"] in MODEL_FIELDS for found in _NAMED.finditer(error.instead))
    return f"{given}: {rule}. {instead}" + (" (names in quotes are fields of the file that --model takes)" if of_model else "")


def _spelled(found: re.Match[str], options: Mapping[str, Any]) -> str:
    name, value = found["name"], found["value"]
    if name in MODEL_FIELDS and value:
        return f'"{name}": {JSON_WORDS.get(value, value)}'.replace("'", '"')
    if name is None or RENAMED.get(name, name) not in options:
        return found[0]
    if value is None:
        return option_of(name) if "_" in name else name  # without one, the name is a word of the language too
    if value == "True":
        return option_of(name)
    if value in ("False", "None") and name not in NONE:
        return option_of(f"no_{name}") if name in SWITCHES and value == "False" else f"no {option_of(name)}"
    return f"{option_of(name)} {NONE[name] if value == 'None' else value[1:-1] if value[0] in QUOTES else value}"
