"""Write the training text of the bundled model into a folder.

Three sources, one file each; a line that holds only ``%`` stands between two documents:

* ``grammar.txt``: documents drawn from ``tiny_grammar.txt`` (part of this project, Apache-2.0).
* ``kjv.txt``: the King James Bible (public domain), printed by Debian's ``bible`` command.
* ``jargon.txt``: the Jargon File 4.4.7 (public domain), from Debian's ``dict-jargon``.

The last two need ``apt-get install bible-kjv dict-jargon`` (Debian 12: 4.38 and 4.4.7-3.1) and are left out
with a note where a package is missing. The same seed gives the same text.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
import shutil
import subprocess
from pathlib import Path

GRAMMAR = Path(__file__).with_name("tiny_grammar.txt")
JARGON = Path("/usr/share/dictd/jargon.dict.dz")
SEPARATOR = "\n%\n"
DEFAULT_RULE = {"h": "person", "f": "elder", "t": "thing"}
"""What a name stands for where the text uses it before it was chosen."""

_CHOICE = re.compile(r"\{([^{}]*)\}")
_SLOT = re.compile(r"\[(\^?)(?:(\w+)=)?(\w+)(?:\.(\d))?\]")
_VERSE = re.compile(r"^(\S+):\d+ (.*)$")
_COARSE = re.compile(
    r"fuck|shit|\bass(hole)?\b|bitch|piss|\bcock|cunt|sex|porn|nigg|rape|\btit|\bhell\b|damn|dick|nazi|drug"
    r"|masturb|orgas|whore|suck|screw|goddam|faggot|\bgay\b|drunk|suicid|bastard|crap|penis|virgin",
    re.IGNORECASE,
)


class Grammar:
    """A set of rules, each a list of alternatives; the rules file describes the notation."""

    def __init__(self, text: str) -> None:
        self.rules: dict[str, list[str]] = {}
        name = ""
        for line in text.splitlines():
            if not line or line.startswith("#"):
                continue
            if line.startswith("@"):
                name = line[1:].strip()
                if name in self.rules:
                    raise ValueError(f"rule {name} is defined twice")
                self.rules[name] = []
            else:
                self.rules[name].append(line)

    def document(self, rng: random.Random, rule: str = "document") -> str:
        """Draw one document."""
        text = self._expand(f"[{rule}]", rng, {}).replace("\\n", "\n")
        text = re.sub(r"[ \t]+", " ", text)
        text = re.sub(r" ?\n ?", "\n", text)
        text = re.sub(r" ([,.?!])", r"\1", text)
        text = re.sub(r"\b([Aa]) (?=[aeiou](?!ne\b|nce\b|ser\b|nit\b)|hour|honest)", r"\1n ", text)
        text = re.sub(r"(^|[.!?] |\n|\|>)([a-z])", lambda m: m[1] + m[2].upper(), text)
        return text.strip()

    def _expand(self, text: str, rng: random.Random, bound: dict[str, str]) -> str:
        while (choice := _CHOICE.search(text)) is not None:
            picked = rng.choice(choice[1].split("|"))
            text = text[: choice.start()] + picked + text[choice.end() :]
        out: list[str] = []
        end = 0
        for slot in _SLOT.finditer(text):
            out.append(text[end : slot.start()])
            out.append(self._slot(slot, rng, bound))
            end = slot.end()
        out.append(text[end:])
        return "".join(out)

    def _slot(self, slot: re.Match[str], rng: random.Random, bound: dict[str, str]) -> str:
        capital, name, rule, field = slot.groups()
        if name is None and (rule in bound or rule in DEFAULT_RULE):
            name, rule = rule, DEFAULT_RULE.get(rule, rule)
        if name is None:
            value = self._expand(rng.choice(self.rules[rule]), rng, bound)
        else:
            if name not in bound:
                bound[name] = self._fresh(rule, rng, bound)
            value = bound[name]
        if field is not None or (name is not None and value.count("/") == 3):
            value = value.split("/")[int(field or 0)]
        return value[:1].upper() + value[1:] if capital else value

    def _fresh(self, rule: str, rng: random.Random, bound: dict[str, str]) -> str:
        """Draw a value that no other name of this document has, if a few tries find one."""
        value = ""
        for _ in range(8):
            value = self._expand(rng.choice(self.rules[rule]), rng, bound)
            if value not in bound.values():
                break
        return value


def kjv_documents(rng: random.Random) -> list[str]:
    """Passages of two to nine verses, none across a chapter's end."""
    if shutil.which("bible") is None:
        return []
    printed = subprocess.run(
        ["bible", "-f", "gen1:1-rev22:21"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    passages: list[str] = []
    verses: list[str] = []
    chapter, length = "", 0
    for line in printed.stdout.splitlines():
        verse = _VERSE.match(line)
        if verse is None:
            continue
        if verse[1] != chapter or len(verses) >= length:
            passages.append(" ".join(verses))
            chapter, verses, length = verse[1], [], rng.randint(2, 9)
        verses.append(verse[2].strip())
    passages.append(" ".join(verses))
    return [passage for passage in passages if passage]


def jargon_documents() -> list[str]:
    """Entries of the Jargon File as ``headword: text``, without markup and without coarse language."""
    if not JARGON.exists():
        return []
    with gzip.open(JARGON, "rt", encoding="utf-8") as file:
        text = file.read()
    text = text.translate(str.maketrans("“”‘’—–", "\"\"''--"))
    found: list[str] = []
    for entry in re.split(r"\n\n(?=\S)", text):
        head, _, body = entry.strip("\n").partition("\n")
        if not body or head.startswith("00-database"):
            continue
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", body):
            if not paragraph.startswith("    "):
                continue
            flat = re.sub(r"\s+", " ", paragraph).strip()
            flat = re.sub(r"\{ ?([^{}]*)\}", r"\1", flat)
            flat = re.sub(r"^(\d+\. ?)?((n|v|vt|vi|adj|adv)\. ?)?(\[[^\]]*\] ?)?", "", flat)
            if len(flat) > 50 and flat.isascii() and not _COARSE.search(flat) and "http" not in flat:
                paragraphs.append(flat)
        if paragraphs and not _COARSE.search(head):
            found.append(f"{head.strip()}: " + "\n".join(paragraphs))
    return found


def main() -> None:
    """Write the text files."""
    parser = argparse.ArgumentParser(description="Write the training text of the bundled model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the text files")
    parser.add_argument("--documents", type=int, default=100000, help="documents to draw from the grammar")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    grammar = Grammar(GRAMMAR.read_text(encoding="utf-8"))
    sources = {
        "grammar": [grammar.document(rng) for _ in range(args.documents)],
        "kjv": kjv_documents(rng),
        "jargon": jargon_documents(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name, documents in sources.items():
        if not documents:
            print(f"{name}: left out (its Debian package is not installed)")
            continue
        text = SEPARATOR.join(documents) + "\n"
        (args.out / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}: {len(documents)} documents, {len(text) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
