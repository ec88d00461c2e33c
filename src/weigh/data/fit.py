#!/usr/bin/env python3
"""Fits the ready-made coefficients of the approximation (families.rs) and says how good they are.

    CACHE/venv/bin/python fit.py CACHE > ../count/families.rs      CACHE as tests/templates/generate.py leaves it

Fitted on sample.txt and on windows of 2,000 characters of what a developer's machine holds, by other authors: Python's
standard library, crates, C headers, npm packages, READMEs, manual pages in nine languages, the conversations of
tests/templates. Errors, printed on stderr, are those of the half of the windows that was not fitted to, by kind of
text: fitted to one half and measured on the other, and the other way round. The two halves share no file.

The features are those of approx.rs, in its order.
"""
import gzip
import json
import os
import pathlib
import random
import re
import sys
from glob import glob

import numpy as np
from tokenizers import Tokenizer

CACHE = pathlib.Path(sys.argv[1])
HERE = pathlib.Path(__file__).resolve().parent
CRATES = os.path.expanduser("~/.cargo/registry/src/*/")
FAMILIES = {"LLAMA3": "llama3", "QWEN": "qwen3", "GPT": "gpt-oss", "DEEPSEEK": "deepseek-v3", "MISTRAL": "mistral", "GEMMA": "gemma3"}
FEATURES, RIDGE = 18, 0.001
LOWER, UPPER, DIGIT, BLANK, NEWLINE, PUNCTUATION, HAN, KANA, OTHER = range(9)


def kind(b, i):
    x = b[i]
    if x < 0x80:
        c = chr(x)
        return (LOWER if "a" <= c <= "z" else UPPER if "A" <= c <= "Z" else DIGIT if "0" <= c <= "9"
                else NEWLINE if c in "\n\r" else BLANK if c in " \t\v\f" else PUNCTUATION)
    if x == 0xE3:
        y = b[i + 1]
        return KANA if 0x81 <= y <= 0x83 else HAN if y >= 0x90 else PUNCTUATION
    return HAN if 0xE4 <= x <= 0xE9 else OTHER


def features(text):
    b, n, before = text.encode(), [0] * FEATURES, NEWLINE
    for i, x in enumerate(b):
        if 0x80 <= x < 0xC0:
            continue
        k = kind(b, i)
        letters = before in (LOWER, UPPER)
        if k in (LOWER, UPPER):
            n[1] += 1
            n[0] += not letters
            n[11] += k == UPPER and before == LOWER
            n[12] += before == DIGIT
        elif k == DIGIT:
            n[2] += 1
            n[3] += before != DIGIT
            n[12] += letters
        elif k == BLANK:
            n[4] += before in (BLANK, NEWLINE)
        elif k == NEWLINE:
            n[5] += before != NEWLINE
        elif k == HAN:
            n[6] += 1
        elif k == KANA:
            n[7] += 1
        elif k == OTHER:
            n[13] += before != OTHER
            n[14 if x <= 0xCF else 15 if x <= 0xD3 else 17 if x <= 0xDF else 16 if 0xEA <= x <= 0xED else 8] += 1
        else:
            n[9] += 1
            n[10] += before != PUNCTUATION
        before = k
    return n


def read(path):
    try:
        return (gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8")).read()
    except (OSError, UnicodeDecodeError):
        return ""


def manual(text):
    text = "\n".join(re.sub(r"^\.[A-Za-z]+ ?", "", line) for line in text.split("\n") if not line.startswith('.\\"'))
    return re.sub(r"\n(?=\S)", " ", re.sub(r"\\f[BIRP]|\\&", "", text).replace("\\-", "-"))


def messages(text):
    found = re.findall(r'^msgstr((?: *"[^\n]*"\n?)+)', text, re.M)
    return "\n".join("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', m)).replace("\\n", "\n") for m in found[1:])


def windows(rng, patterns, n, clean=lambda text: text, size=2000):
    files = sorted({file for pattern in patterns for file in glob(pattern)})
    rng.shuffle(files)
    out = []
    for text in (clean(read(file)) for file in files):
        if len(out) >= n:
            break
        if len(text) > 1.2 * size:
            starts = [text.find("\n", rng.randrange(len(text) - size)) + 1 for _ in range(2)]
            out += [text[at : at + size] for at in starts if len(text) - at > 0.8 * size]
            out += [out[-1]] * (len(out) % 2) if out else []
    return out[:n]


def texts():
    rng = random.Random(5)
    man = "/usr/share/man/{}man*/*.gz"
    kinds = {
        "Python": windows(rng, [os.path.dirname(os.__file__) + "/*.py"], 60),
        "Rust": windows(rng, [CRATES + "[a-z]*/src/*.rs"], 60),
        "C": windows(rng, ["/usr/include/*.h", CRATES + "*sys*/*/*/*.c"], 60),
        "JavaScript": windows(rng, ["/usr/share/nodejs/*/*.js", "/usr/share/nodejs/*/lib/*.js"], 60),
        "English READMEs": windows(rng, [CRATES + "*/README.md"], 60),
        "English manuals": windows(rng, [man.format("")], 60, manual),
        "YAML and TOML": windows(rng, [CRATES + "*/Cargo.toml", CRATES + "*/.github/workflows/*.yml"], 60),
        "JSON": windows(rng, [CRATES + "*/*/*.json", "/usr/share/nodejs/*/package.json"], 40),
        "Chinese": windows(rng, [CRATES + "*/*/po/zh_*.po"], 20, messages) + windows(rng, [man.format("zh_CN/")], 20, manual),
    }
    languages = {"German": "de", "French": "fr", "Spanish": "es", "Polish": "pl", "Russian": "ru", "Japanese": "ja", "Korean": "ko", "Turkish": "tr"}
    for name, code in languages.items():
        kinds[name] = windows(rng, [man.format(code + "/")], 40, manual)
    conversations = []
    for line in open(CACHE / "corpus.jsonl", encoding="utf-8"):
        contents = (m.get("content") for m in json.loads(line)["messages"])
        conversations.append("\n".join(c if isinstance(c, str) else json.dumps(c, ensure_ascii=False) for c in contents))
    kinds["test conversations"] = [text for text in conversations if len(text) > 600][:60]
    return {name: found for name, found in kinds.items() if len(found) >= 4}


def counter(family):
    place = CACHE / family
    if (place / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
        return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    tekken = Tekkenizer.from_file(place / "tekken.json")
    return lambda text: len(tekken.encode(text, bos=False, eos=False))


def solve(rows, counts):
    """Least squares of relative errors, no coefficient below zero."""
    a = rows / counts[:, None]
    m, r = a.T @ a, a.T @ np.ones(len(counts))
    m += np.diag(RIDGE * np.diag(m) + 1e-9)
    kept = np.ones(FEATURES, bool)
    while True:
        x = np.zeros(FEATURES)
        x[kept] = np.linalg.solve(m[np.ix_(kept, kept)], r[kept])
        if (x >= 0).all():
            return x
        kept &= x >= 0


def main():
    sample = (HERE / "sample.txt").read_text(encoding="utf-8")
    base = [sample[at : at + 1200] for at in range(0, len(sample), 1200)]
    kinds = texts()
    named = [(name, i // 2 % 2, text) for name, found in kinds.items() for i, text in enumerate(found)]
    rows = np.array([features(text) for text in base + [text for _, _, text in named]], float)
    half = np.array([-1] * len(base) + [h for _, h, _ in named])
    names = np.array([""] * len(base) + [name for name, _, _ in named])
    counts, errors = {}, {}
    for constant, family in FAMILIES.items():
        count = counter(family)
        counts[constant] = np.array([count(text) for text in base + [text for _, _, text in named]], float)
    for constant, own in list(counts.items()) + [("GENERIC", None)]:
        errors[constant] = np.zeros(len(half))
        for h in (0, 1):
            fitted = half != h
            # Generic: fitted to the other five, measured on the one left out.
            for left_out in counts if own is None else [constant]:
                with_ = [c for c in counts if c != left_out] if own is None else [constant]
                x = solve(np.vstack([rows[fitted]] * len(with_)), np.concatenate([counts[c][fitted] for c in with_]))
                at = half == h
                share = np.abs(rows[at] @ x / counts[left_out][at] - 1)
                errors[constant][at] += share / (len(counts) if own is None else 1)
    real = half >= 0
    print(f"{'':20}" + "".join(f"{c:>10}" for c in errors), file=sys.stderr)
    for name in kinds:
        print(f"{name:20}" + "".join(f"{100 * e[names == name].mean():9.1f}%" for e in errors.values()), file=sys.stderr)
    means = {c: np.mean([e[names == name].mean() for name in kinds]) for c, e in errors.items()}
    print(f"{'mean of the kinds':20}" + "".join(f"{100 * m:9.1f}%" for m in means.values()), file=sys.stderr)
    print(f"{'95th percentile':20}" + "".join(f"{100 * np.quantile(e[real], 0.95):9.1f}%" for e in errors.values()), file=sys.stderr)
    print("//! Ready-made coefficients of the approximation, written by `src/weigh/data/fit.py`.\n")
    print("use super::approx::Coefficients;")
    sets = {c: solve(rows, counts[c]) for c in counts}
    sets["GENERIC"] = solve(np.vstack([rows] * len(counts)), np.concatenate(list(counts.values())))
    for constant, x in sets.items():
        what = FAMILIES.get(constant, "all six families together")
        print(f"\n/// Fitted to {what}.")
        print(f"pub(super) const {constant}: Coefficients = Coefficients([{', '.join(f'{c:.3f}' for c in x)}]);")


main()
