"""YAML text to plain dicts. Reads ``1e-6`` as a number and refuses a key written twice."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from rlhf_mp.errors import ConfigError, Problem


def read_layers(path: Path, below: tuple[Path, ...] = ()) -> list[dict[Any, Any]]:
    """The file and those it extends, the most basic first.

    Args:
        below: files that led here by ``extends``.

    Raises:
        ConfigError: a file is missing, is no YAML mapping, or extends itself.
    """
    if path.resolve() in below:
        raise ConfigError([Problem(str(path), "extends", "the file extends itself", "remove one `extends:`")])
    tree = read_tree(path)
    if "extends" not in tree:
        return [tree]
    base = tree.pop("extends")
    if not isinstance(base, str):
        raise ConfigError([Problem(f"{path}: extends", base, "must be one file name", "extends: base.yaml")])
    return [*read_layers(path.parent / base, (*below, path.resolve())), tree]


def read_tree(path: Path) -> dict[Any, Any]:
    """One file's mapping; an empty file is an empty mapping.

    Raises:
        ConfigError: missing, unreadable, a syntax error (with its line), or not a mapping.
    """
    try:
        node = OmegaConf.load(path)
    except MarkedYAMLError as error:
        where, reason = f"{path}:{error.problem_mark.line + 1}", error.problem
        if error.context_mark is not None:  # an unclosed bracket shows only much later
            reason += f" {error.context} that starts on line {error.context_mark.line + 1}"
        raise _unreadable(where, reason, "correct the YAML there") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise _unreadable(str(path), str(error).splitlines()[0], "write plain YAML in UTF-8") from error
    except FileNotFoundError as error:
        raise _unreadable(str(path), "there is no such file", "check the path; see configs/ for examples") from error
    except OSError as error:
        raise _unreadable(str(path), error.strerror, "make it readable") from error
    tree = OmegaConf.to_container(node)
    if not isinstance(tree, dict):
        raise _unreadable(str(path), "the file is a list, not keys with values", "data: {train_files: ...}")
    return tree


def read_override(text: str) -> tuple[str, Any]:
    """``key=value`` with the value read as YAML; nothing after ``=`` is the empty text.

    Raises:
        ConfigError: no ``=``, or a value that is not YAML.
    """
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ConfigError([Problem(text, text, "not of the form key=value", f"{text.strip('=') or 'key'}=<value>")])
    if not value:
        return key, ""
    try:
        return key, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))["value"]
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError([Problem(key, value, "the value is not YAML", f"quote it: '{key}=\"...\"'")]) from error


def _unreadable(key: str, reason: str, fix: str) -> ConfigError:
    return ConfigError([Problem(key, "unreadable", reason, fix)])
