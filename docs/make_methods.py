# ruff: noqa: E501  (lines of Markdown)
"""Write the page of every method, and the table that compares them, from the methods' docstrings.

python docs/make_methods.py            # writes docs/methods/*.md
python docs/make_methods.py --check    # says which are out of date, and fails if any is
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from strategies.describe import Description, describe
from strategies.rules import RULES

FOLDER = Path(__file__).parent / "methods"
WRITTEN_BY = "<!-- written by docs/make_methods.py from the docstring of strategies/rules; do not edit -->\n\n"
INTRODUCTION = """# Methods

Every method is a Flower strategy in both APIs (`from fedpcd import {example}`, `from fedpcd.legacy import {example}`) and a
name for the app: `fedpcd run . -c "strategy='{name}'"`. All check replies, sort clients, keep state and report as FedPCD does.

| method | run-config name | what it does | asks clients for | cost |
|---|---|---|---|---|
"""
NO_SOURCE = """
## Not here

| method | why |
|---|---|
| FedMC+ (Shen et al. 2025) | no public source: neither text, abstract nor code could be found, so there is nothing to implement |

`guarantees` on the pages are the properties that `tests/strategies/test_method_properties.py` checks on random cases.
"""


def page(method: Description) -> str:
    """The page of one method, Markdown."""
    keys = "\n".join(f"| `{key}` | `{value}` |" for key, value in method.hyper_parameters.items())
    parts = [
        f"# {method.title}",
        method.summary,
        method.formula,
        f"**Needs.** {method.needs}",
        f"**Guarantees.** {method.guarantees}",
        f"**Cost.** {method.cost}",
        f"**Use it when** {method.use}",
        f"```bash\nfedpcd run . -c \"strategy='{method.name}'\" --compare-with fedavg\n```",
        f"## Hyper-parameters\n\n| run-config key | default |\n|---|---|\n{keys}" if keys else "",
        parameters(method.parameters),
        f"## Differences to the paper and its code\n\n{joined(method.notes)}",
        f"## Reference\n\n{joined(method.references)}",
    ]
    return WRITTEN_BY + markdown("\n\n".join(part for part in parts if part)) + "\n"


def parameters(section: str) -> str:
    """Numpydoc's parameters as a list."""
    entries = re.split(r"\n(?=\S)", section) if section else []
    lines = []
    for entry in entries:
        head, _, text = entry.partition("\n")
        name, _, kind = head.partition(" : ")
        lines.append(f"- `{name.replace('_', '-')}` ({kind}): {' '.join(text.split())}")
    return "\n".join(lines)


def joined(text: str) -> str:
    """Paragraphs on one line each."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def markdown(text: str) -> str:
    """Docstrings' double backticks as Markdown's single ones."""
    return text.replace("``", "`") if "```" not in text else re.sub(r"(?<!`)``(?!`)", "`", text)


def index(methods: list[Description]) -> str:
    """The comparison table, Markdown."""
    rows = [f"| [{m.title}](methods/{m.name}.md) | `{m.name}` | {m.summary} | {m.needs} | {m.cost} |" for m in methods]
    head = INTRODUCTION.format(example="CRAFT", name="craft")
    return WRITTEN_BY + markdown(head + "\n".join(rows) + "\n" + NO_SOURCE)


def pages() -> dict[Path, str]:
    """Every generated file with its content."""
    methods = [describe(name, rule) for name, rule in RULES.items()]
    return {FOLDER.with_suffix(".md"): index(methods), **{FOLDER / f"{m.name}.md": page(m) for m in methods}}


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    files = pages()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    stale += [path for path in FOLDER.glob("*.md") if path not in files]
    if check:
        sys.stderr.writelines(f"out of date: {path} (run python docs/make_methods.py)\n" for path in stale)
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(files[path]) if path in files else path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
