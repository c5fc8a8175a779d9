"""The harness on tasks in local files: a streamed model gives it the results of the plain model."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
import yaml
from families import build
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

import trunkline
from trunkline.data import make_byte_tokenizer
from trunkline.evaluate.harness import StreamedLM
from trunkline.generation import prefixes

BOOK = "It was a bright cold day, and the clocks were striking thirteen. " * 12  # 780 tokens, many chunks
ASKED = ("When did the clocks strike?", "How was the day?", "Whose clocks were they?")
CHOICES = (" at thirteen", " cold", " ours, of course")
HIDDEN = [*range(32), *range(127, 258)]  # what is no letter of ASCII, so that generated text is plain
TOLERANCE = {"rel": 1e-6, "abs": 2e-4}  # fp32 logits of about 10, over some dozen tokens
EOS = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the byte tokenizer, as `pretrained` takes it."""
    path = tmp_path_factory.mktemp("harness") / "model"
    model = build("llama", torch.float32, vocab_size=258, max_position_embeddings=2048, bos_token_id=None,
                  eos_token_id=EOS, pad_token_id=257)  # fmt: skip
    model.save_pretrained(path)
    make_byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def _scored(model: Any, context: str, continuation: str) -> tuple[float, bool]:
    """Log-softmax over all logits of the whole sequence; spaces at the end of a context belong to what follows."""
    border = len(context.rstrip().encode())
    whole = (context + continuation).encode()
    before, after = list(whole[:border]) or [EOS], list(whole[border:])
    logits = model(torch.tensor([before + after]), use_cache=False).logits[0].double().log_softmax(-1)
    behind = range(len(before) - 1, len(before) + len(after) - 1)
    log_prob = sum(float(logits[at, token]) for at, token in zip(behind, after, strict=True))
    return log_prob, all(int(logits[at].argmax()) == token for at, token in zip(behind, after, strict=True))


@torch.no_grad()
def _written(model: Any, context: str, count: int) -> str:
    """Greedily, all logits anew for each token."""
    ids = list(context.encode())
    for _ in range(count):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        logits[HIDDEN] = -torch.inf
        ids.append(int(logits.argmax()))
    return bytes(ids[-count:]).decode()


def _task(folder: Path, name: str, rows: list[dict[str, Any]], **config: Any) -> None:
    (folder / f"{name}.json").write_text("\n".join(map(json.dumps, rows)))
    files = {"data_files": {"test": str(folder / f"{name}.json")}, "cache_dir": str(folder / "cache")}
    whole = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **config}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(whole))


def _requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, 0) for each in arguments]  # type: ignore[arg-type]


@pytest.fixture
def tasks(tmp_path: Path, plain: Any) -> tuple[Path, list[str]]:
    """A multiple-choice task and one with generated answers, and what the plain model generates."""
    rows = [{"question": each, "gold": at, "choices": list(CHOICES)} for at, each in enumerate(ASKED)]
    _task(
        tmp_path, "local_choice", rows, output_type="multiple_choice", doc_to_text=BOOK + "{{question}}",
        doc_to_target="gold", doc_to_choice="choices", target_delimiter="",
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )  # fmt: skip
    written = [_written(plain, BOOK + each, 24) for each in ASKED]
    stop = written[1][9:11]
    answers = [text.split(stop)[0] for text in written]
    rows = [{"question": each, "answer": a} for each, a in zip(ASKED, [*answers[:2], "no such answer"], strict=True)]
    _task(
        tmp_path, "local_writing", rows, output_type="generate_until", doc_to_text=BOOK + "{{question}}",
        doc_to_target="answer", target_delimiter="", metric_list=[{"metric": "exact_match"}],
        generation_kwargs={"until": [stop], "max_gen_toks": 24, "suppress_tokens": HIDDEN},
    )  # fmt: skip
    return tmp_path, answers


def test_results_are_those_of_the_plain_model(
    folder: Path, plain: Any, tasks: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, answers = tasks
    read: list[int] = []

    def counted(model: Any, ids: torch.Tensor, **given: Any) -> trunkline.StreamedCache:
        read.append(ids.shape[1])
        return trunkline.prefill(model, ids, **given)

    monkeypatch.setattr(prefixes, "prefill", counted)
    found = lm_eval.simple_evaluate(
        "trunkline", {"pretrained": str(folder), "chunk_size": 64, "device": "cpu"}, bootstrap_iters=0,
        tasks=["local_choice", "local_writing"],
        task_manager=TaskManager(include_path=str(path), include_defaults=False),
    )  # fmt: skip
    assert found is not None
    right, normed = 0, 0
    for sample in found["samples"]["local_choice"]:
        context = BOOK + sample["doc"]["question"]
        expected = [_scored(plain, context, choice) for choice in CHOICES]
        for (response,), (log_prob, is_greedy) in zip(sample["resps"], expected, strict=True):
            assert response == (pytest.approx(log_prob, **TOLERANCE), is_greedy)
        values = [log_prob for log_prob, _ in expected]
        right += values.index(max(values)) == sample["doc"]["gold"]
        each = [value / len(choice) for value, choice in zip(values, CHOICES, strict=True)]
        normed += each.index(max(each)) == sample["doc"]["gold"]
    results = found["results"]
    assert results["local_choice"]["acc,none"] == pytest.approx(right / 3)
    assert results["local_choice"]["acc_norm,none"] == pytest.approx(normed / 3)
    assert [sample["filtered_resps"] for sample in found["samples"]["local_writing"]] == [[each] for each in answers]
    assert results["local_writing"]["exact_match,none"] == pytest.approx(2 / 3)
    # The book once for each of the two tasks, though nine choices and three answers follow it.
    assert sum(read) < 2 * (len(BOOK) + sum(map(len, ASKED)))
    assert found["config"]["chunk_size"] == 64


@pytest.mark.soak
def test_command_line(folder: Path, plain: Any, tasks: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tasks[0]
    settings = f"pretrained={folder},chunk_size=64,device_budget=20MiB,offload_dir={path}"
    words = [
        "--model", "trunkline", "--model_args", settings, "--tasks", "local_choice", "--include_path", str(path),
        "--device", "cpu", "--batch_size", "2", "--log_samples", "--output_path", str(path / "out"),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["harness", *words])
    runpy.run_module("trunkline.evaluate.harness", run_name="__main__")
    (results,) = (path / "out").rglob("results_*.json")
    page = json.loads(results.read_text())
    values = [[_scored(plain, BOOK + each, choice)[0] for choice in CHOICES] for each in ASKED]
    right = sum(row.index(max(row)) == at for at, row in enumerate(values))
    assert page["results"]["local_choice"]["acc,none"] == pytest.approx(right / 3)


SCORED = [
    *((BOOK + each, choice) for each in ASKED for choice in CHOICES),
    (BOOK, " and"),
    (BOOK + "The end. ", "So long."),  # the space goes with the continuation
    ("Alone", " here"),
    ("Alone", ""),
    ("", "From nothing"),
    ("Long answer:", " yes" * 100),  # too long to be scored behind a cache
    ("Long answer:", " no" * 90),
]


@pytest.mark.parametrize(
    ("share", "batch_size", "place"),
    [(True, 1, "device"), (True, 4, "disk"), (False, 4, "device"), (False, 1, "disk")],
)
def test_log_likelihoods(folder: Path, plain: Any, share: bool, batch_size: int, place: str, tmp_path: Path) -> None:
    settings = {"device_budget": 2_000_000, "offload_dir": tmp_path} if place == "disk" else {}
    lm = StreamedLM(
        str(folder), chunk_size=64, device="cpu", share_prefill=share, batch_size=str(batch_size), **settings
    )
    kept: dict[Any, Any] = {}
    hook = CacheHook(None)
    hook.add_partial = lambda name, key, value: kept.update({(name, key): value})  # type: ignore[method-assign]
    lm.set_cache_hook(hook)
    found = lm.loglikelihood(_requests("loglikelihood", SCORED), disable_tqdm=True)
    for (context, continuation), result in zip(SCORED, found, strict=True):
        log_prob, is_greedy = _scored(plain, context, continuation)
        assert result == (pytest.approx(log_prob, **TOLERANCE), is_greedy)
    assert kept == {("loglikelihood", key): value for key, value in zip(SCORED, found, strict=True)}


def test_the_most_likely_continuation_is_greedy(folder: Path, plain: Any) -> None:
    lm = StreamedLM(folder, chunk_size=64, device="cpu")
    with torch.no_grad():
        ids = plain.generate(torch.tensor([list(BOOK.encode())]), max_new_tokens=3, do_sample=False)[0].tolist()
    pairs = [((BOOK, ""), ids[:-3], ids[-3:]), ((BOOK, ""), ids[:-3], [ids[-3], (ids[-2] + 1) % 256])]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(pairs, disable_tqdm=True)] == [True, False]


def test_documents_are_scored_whole(folder: Path, plain: Any) -> None:
    lm = StreamedLM(folder, chunk_size=64, device="cpu")
    texts = [BOOK, "Short.", ""]
    with pytest.warns(UserWarning, match="2,341 tokens, and the model's max_position_embeddings is 2,048"):
        lm.loglikelihood_rolling(_requests("loglikelihood_rolling", [(BOOK * 3,)]), disable_tqdm=True)
    found = lm.loglikelihood_rolling(_requests("loglikelihood_rolling", [(each,) for each in texts]), disable_tqdm=True)
    for text, log_prob in zip(texts, found, strict=True):
        # Summed over 780 tokens, each with fp32's rounding of logits of about 10.
        assert log_prob == pytest.approx(_scored(plain, "", text)[0], rel=1e-6, abs=1e-3)


def test_generation_does_not_depend_on_sharing_and_can_sample(folder: Path, plain: Any) -> None:
    how = {"max_gen_toks": 8, "suppress_tokens": HIDDEN}
    contexts = [BOOK + ASKED[0], BOOK + ASKED[1], "A", "Another text", BOOK + ASKED[0]]
    requests = _requests("generate_until", [(each, dict(how)) for each in contexts])
    expected = [_written(plain, each, 8) for each in contexts]
    for share in (True, False):
        lm = StreamedLM(folder, chunk_size=64, device="cpu", share_prefill=share)
        assert lm.generate_until(requests, disable_tqdm=True) == expected
    drawn = _requests("generate_until", [(BOOK, {**how, "temperature": 5.0, "top_p": 0.9}) for _ in range(4)])
    assert len(set(lm.generate_until(drawn, disable_tqdm=True))) > 1
    stopped = _requests("generate_until", [("A", {**how, "until": expected[2][0]}), ("", dict(how))])
    first, second = lm.generate_until(stopped, disable_tqdm=True)
    assert first == ""
    assert len(second) == 8


def test_a_bos_token_of_the_tokenizer_stands_before_contexts_once(folder: Path) -> None:
    """Also where a chat template has written it; it is not scored."""
    model, tokenizer = build("llama", vocab_size=259).eval(), make_byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    lm = StreamedLM(model=trunkline.stream(model, chunk_size=32), tokenizer=tokenizer)
    assert lm.tok_encode("ab") == lm.tok_encode("<s>ab") == [bos, 97, 98]
    assert lm.tok_encode("ab", add_special_tokens=False) == [97, 98]
    assert [ids.tolist() for ids in lm._encode_pair("a ", "b")] == [[bos, 97], [32, 98]]
    scored: list[tuple[list[int], list[int]]] = []

    def score(name: str, keys: Any, requests: Any, disable_tqdm: bool) -> list[tuple[float, bool]]:
        scored.extend((context.tolist(), ids.tolist()) for context, ids in requests)
        return [(0.0, True)] * len(requests)

    lm._score = score  # type: ignore[method-assign]
    lm.loglikelihood(_requests("loglikelihood", [("", "ab"), ("<s>", "ab"), ("  ", "ab")]), disable_tqdm=True)
    lm.loglikelihood_rolling(_requests("loglikelihood_rolling", [("ab",), ("<s>ab",)]), disable_tqdm=True)
    assert scored == [([bos], [97, 98]), ([bos], [97, 98]), ([bos], [32, 32, 97, 98]), *[([bos], [97, 98])] * 2]
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a beginning-of-sequence nor an end-of-sequence token"):
        StreamedLM(model=model, tokenizer=tokenizer)


def test_chat_templates(folder: Path) -> None:
    model, tokenizer = build("llama", vocab_size=258).eval(), AutoTokenizer.from_pretrained(folder)
    trunkline.stream(model, chunk_size=32)
    lm = StreamedLM(model=model, tokenizer=tokenizer)
    tokenizer.chat_template = {
        "default": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}!{% endif %}",
        "loud": "{{ messages[0].content | upper }}",
    }
    said = [{"role": "user", "content": "Hello"}]
    assert lm.chat_template(True) == tokenizer.chat_template["default"]
    assert lm.apply_chat_template(said) == "<user>Hello!"
    assert lm.apply_chat_template(said, add_generation_prompt=False) == "<user>Hello"
    lm.chat_template("loud")
    assert lm.apply_chat_template(said) == "HELLO"
    assert lm.tokenizer_name == str(folder).replace("/", "__")
    assert (lm.rank, lm.world_size, str(lm.device)) == (0, 1, "cpu")
    assert (lm.tok_encode("ab"), lm.eot_token_id, lm.prefix_token_id) == ([97, 98], EOS, EOS)


def test_invalid_settings_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = build("llama", vocab_size=258).eval(), make_byte_tokenizer()
    for settings, message in (
        ({}, "give either pretrained"),
        ({"pretrained": folder, "model": model}, "give either pretrained"),
        ({"pretrained": folder, "chunk": 3}, r"chunk is not a setting of stream\(\): did you mean chunk_size"),
        ({"pretrained": folder, "trust_remote_code": True}, "trust_remote_code is not a setting"),
        ({"pretrained": folder, "tokenizer": "other"}, "that of pretrained is in its folder"),
        ({"pretrained": folder, "batch_size": "auto"}, "batch_size='auto'"),
        ({"pretrained": folder, "share_prefill": "no"}, "share_prefill='no'"),
        ({"pretrained": folder, "max_length": 0}, "max_length=0"),
        ({"pretrained": folder / "none"}, "is no model folder"),
        ({"model": model}, "model goes with its tokenizer"),
        ({"model": model, "tokenizer": tokenizer}, "is not streamed"),
        ({"model": model, "tokenizer": tokenizer, "chunk_size": 3}, "chunk_size goes with pretrained"),
    ):
        with pytest.raises(ValueError, match=message):
            StreamedLM(**settings)
    trunkline.stream(model, chunk_size=32)
    with pytest.raises(ValueError, match="in training mode"):
        StreamedLM(model=model.train(), tokenizer=tokenizer)
    lm = StreamedLM(model=model.eval(), tokenizer=tokenizer, max_length=10)
    lm.loglikelihood(_requests("loglikelihood", [("12345", "67890")]), disable_tqdm=True)
    for run, kind, arguments in (
        (lm.loglikelihood, "loglikelihood", ("123456", "78901")),
        (lm.loglikelihood_rolling, "loglikelihood_rolling", ("1234567890",)),
        (lm.generate_until, "generate_until", ("12345", {"max_gen_toks": 6})),
    ):
        with pytest.raises(ValueError, match="a request has 11 tokens, with those to generate, and max_length is 10"):
            run(_requests(kind, [arguments]), disable_tqdm=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="in one process"):
        StreamedLM(model=model, tokenizer=tokenizer)


@pytest.mark.soak
def test_optional_packages_are_imported_only_where_needed() -> None:
    code = (
        "import sys, trunkline.evaluate, trunkline.generation.prefixes\n"
        "assert not [m for m in ('lm_eval', 'datasets', 'matplotlib', 'rich', 'typer') if m in sys.modules]\n"
        "sys.modules['lm_eval'] = None\n"
        "import trunkline.evaluate.harness"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines()[-1].endswith("lm-evaluation-harness: pip install 'trunkline[lm-eval]'")
