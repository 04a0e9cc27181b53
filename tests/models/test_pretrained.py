"""Models of the transformers library: what is read from a folder, what learns, what is refused."""

import json
import shutil
import socket
import subprocess
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import Tensor

from benchmarks.memory import Texts
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.data.at_party import FeatureBlock
from vfl_flower.data.samples import Samples, each
from vfl_flower.launch.submission import from_anywhere
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.models.training import kept, load_model, model_arrays, trained
from vfl_flower.party import about, builder, state
from vfl_flower.party import session as between
from vfl_flower.party.party import Party
from vfl_flower.protocol.systems import refuse_places, resolve
from vfl_flower.transport.flower_internals import begin_task, state_from_bytes, state_to_bytes
from vfl_flower.transport.messages import EvaluateOrder, TrainOrder, Upload
from vfl_flower.transport.wire import read_reply, to_message

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if find_spec("peft") is None:  # to import it takes seconds
    pytest.skip("peft is not installed", allow_module_level=True)

from vfl_flower.models import pretrained as module  # noqa: E402
from vfl_flower.models.pretrained import Pretrained  # noqa: E402

TEXT = {"input_ids": torch.arange(7), "attention_mask": torch.tensor([1, 1, 1, 1, 1, 0, 0])}
IMAGE = torch.rand(8, 8, 3, generator=torch.Generator().manual_seed(0))
DIM = torch.tensor([1.0, 0.5, 0.1])[:, None, None, None]
SAMPLES: dict[str, Samples] = {"distilbert": TEXT, "bert": TEXT, "vit": IMAGE, "resnet": IMAGE}


def configuration(kind: str) -> Any:
    text = {"vocab_size": 50, "max_position_embeddings": 20}
    wide = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = {
        "distilbert": lambda: transformers.DistilBertConfig(
            **text, dim=16, hidden_dim=32, n_heads=2, n_layers=2, dropout=0.0, attention_dropout=0.0
        ),
        "bert": lambda: transformers.BertConfig(**text, **wide, intermediate_size=32),
        "vit": lambda: transformers.ViTConfig(
            **wide, intermediate_size=32, image_size=8, patch_size=4
        ),
        "resnet": lambda: transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
        ),
    }
    return made[kind]()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights of each kind, and one with its configuration alone: KIND-bare."""
    place = tmp_path_factory.mktemp("models")
    transformers.utils.logging.disable_progress_bar()
    for kind in SAMPLES:
        torch.manual_seed(len(kind))
        transformers.AutoModel.from_config(configuration(kind)).save_pretrained(place / kind)
        configuration(kind).save_pretrained(place / f"{kind}-bare")
    return place


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **more: Any) -> Any:
        raise AssertionError("somebody looks something up")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def rows_of(sample: Samples, rows: int = 3) -> Samples:
    return each(sample, lambda x: torch.stack([x] * rows))


def copy_of(folders: Path, kind: str, tmp_path: Path) -> Path:
    place = tmp_path / kind
    shutil.copytree(folders / kind, place)
    return place


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("kind", SAMPLES)
def test_the_weights_in_the_folder_are_the_model_s(kind: str, folders: Path) -> None:
    model = Pretrained(str(folders / kind), SAMPLES[kind], 5)
    saved = transformers.AutoModel.from_pretrained(folders / kind, local_files_only=True)
    ours = model.backbone.state_dict()
    assert ours.keys() == saved.state_dict().keys()
    assert all(torch.equal(ours[name], each) for name, each in saved.state_dict().items())
    h = model(rows_of(SAMPLES[kind]))
    assert h.shape == (3, 5) and h.isfinite().all()
    gradients = torch.autograd.grad(h.square().sum(), list(model.parameters()))
    assert all(each.isfinite().all() for each in gradients)


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_configuration_alone_gives_a_model_by_the_seed(kind: str, folders: Path) -> None:
    def weights(**keys: Any) -> dict[str, Tensor]:
        config = resolve({"bottom-model": f"hf:{folders / f'{kind}-bare'}", **keys})
        return build_bottom(config, 0, SAMPLES[kind], 5).state_dict()

    one, same, other = weights(), weights(), weights(seed=1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_pooled_is_the_mean_of_the_tokens_that_the_mask_holds(folders: Path) -> None:
    model = Pretrained(str(folders / "distilbert"), TEXT, 5).eval()
    x = rows_of(TEXT)
    assert isinstance(x, dict)
    states = model.backbone(**x).last_hidden_state
    torch.testing.assert_close(model.pooled(x), states[:, :5].mean(1))
    padded = {**x, "input_ids": x["input_ids"].masked_fill(x["attention_mask"] == 0, 9)}
    torch.testing.assert_close(model.pooled(padded), model.pooled(x))  # masked tokens count not


def test_images_are_given_with_colours_last(folders: Path, tmp_path: Path) -> None:
    model = Pretrained(str(folders / "vit"), IMAGE, 5).eval()
    x = torch.stack([IMAGE, IMAGE.flip(0)])
    expected = model.backbone(pixel_values=x.permute(0, 3, 1, 2)).pooler_output
    torch.testing.assert_close(model.pooled(x), expected)
    config = configuration("resnet")
    config.num_channels = 1  # images without colours
    config.save_pretrained(tmp_path)
    assert Pretrained(str(tmp_path), IMAGE[..., 0], 5)(rows_of(IMAGE[..., 0])).shape == (3, 5)


def test_weights_of_half_precision_train_in_float32(folders: Path, tmp_path: Path) -> None:
    saved = transformers.AutoModel.from_pretrained(folders / "vit", dtype=torch.float16)
    saved.save_pretrained(tmp_path)
    model = Pretrained(str(tmp_path), IMAGE, 5)
    assert {each.dtype for each in model.parameters()} == {torch.float32}


# --- what learns --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SAMPLES)
def test_adapters_and_head_learn_alone(kind: str, folders: Path) -> None:
    model = Pretrained(str(folders / kind), SAMPLES[kind], 5, lora=2)
    learn = trained(model)
    assert learn and all("lora_" in name or name.startswith("head.") for name in learn)
    before = {name: each.clone() for name, each in model.named_parameters()}
    optimizer = torch.optim.Adam(list(learn.values()), lr=0.1)
    x = each(rows_of(SAMPLES[kind]), lambda x: x if kind in ("distilbert", "bert") else x * DIM)
    for _ in range(3):  # of a pair of adapters, one is zero at first
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    changed = {n for n, each in model.named_parameters() if not torch.equal(each, before[n])}
    assert changed == learn.keys()


def test_a_backbone_that_is_frozen_stays_as_it_is(folders: Path) -> None:
    model = Pretrained(str(folders / "resnet"), IMAGE, 5, freeze=True)
    assert trained(model).keys() == {"head.weight", "head.bias"}
    before = {name: each.clone() for name, each in model.backbone.state_dict().items()}
    model.train()(rows_of(IMAGE))
    assert all(torch.equal(before[n], each) for n, each in model.backbone.state_dict().items())
    free = Pretrained(str(folders / "resnet"), IMAGE, 5)  # the control
    free.train()(rows_of(IMAGE))
    statistics = "embedder.embedder.normalization.running_mean"
    assert not torch.equal(free.backbone.state_dict()[statistics], before[statistics])


@pytest.mark.parametrize("args", [{"lora": 2}, {"freeze": True}, {"lora": 2, "freeze": True}])
def test_states_hold_what_learns_alone_if_the_rest_is_in_a_file(
    args: dict[str, Any], folders: Path
) -> None:
    model = Pretrained(str(folders / "distilbert"), TEXT, 5, **args)
    assert kept(model).keys() == trained(model).keys()
    for of_all in (
        Pretrained(str(folders / "distilbert"), TEXT, 5),
        Pretrained(str(folders / "distilbert-bare"), TEXT, 5, **args),  # its file is gone
    ):
        assert kept(of_all).keys() == dict(of_all.named_parameters()).keys()
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(1.0)
    again = Pretrained(str(folders / "distilbert"), TEXT, 5, **args)
    load_model(again, model_arrays(model))
    torch.testing.assert_close(again.eval()(rows_of(TEXT)), model.eval()(rows_of(TEXT)))


def test_weights_that_lack_a_pooler_are_in_states_whole(folders: Path, tmp_path: Path) -> None:
    saved = transformers.BertModel.from_pretrained(folders / "bert", add_pooling_layer=False)
    saved.save_pretrained(tmp_path)
    model = Pretrained(str(tmp_path), TEXT, 5, freeze=True)
    assert any("pooler" in name for name in dict(model.named_parameters()))  # drawn at random
    assert kept(model).keys() == dict(model.named_parameters()).keys()


# --- in a run -----------------------------------------------------------------------------------


@pytest.fixture
def context() -> Context:
    begin_task()
    between.live.clear()
    node: dict[str, Any] = {"partition-id": 0, "num-partitions": 2, "simulated": True}
    return Context(7, 2, node, RecordDict(), {})


def a_party(folder: Path, context: Context, strategy: str, **args: Any) -> Party:
    """A party with texts, and the state that it begins with."""
    keys = {"strategy": strategy, "batch-size": 4, "window": 2, "party-lr": 0.1, "noise-seed": 0}
    config = resolve({**keys, "bottom-model": f"hf:{folder}"})
    names = np.arange(16), np.arange(16, 24)
    block = FeatureBlock(Texts(16, 50, 7), Texts(8, 50, 7), "", None, "", *names)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        if args:
            patch.setattr(module, "pretrained", lambda place: partial(Pretrained, place, **args))
        party = Party(config, 0, 2, 3, block)
    between.Session(context, party).write()
    return party


def two_turns(context: Context) -> Upload:
    """Two windows, feedback for the first, and the test rows."""
    feedback: dict[str, Any] = {}
    for exchange in (1, 2):
        at: dict[str, Any] = {"exchange": exchange, "epoch": exchange - 1, "first": 0, "steps": 2}
        upload = asked(context, TrainOrder(**at, coordinated=False, arrays=feedback))
        if "perturbed" in upload.arrays:
            feedback = {"difference": np.array([0.5, -0.2], np.float32)}
        else:
            feedback = {"gradient": upload.arrays["embedding"] / 10}
    return asked(context, EvaluateOrder(exchange=3, arrays=feedback))


def asked(context: Context, order: Any) -> Upload:
    return read_reply(client_app.app(to_message(order, 2, 60), context), Upload)


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", ["vafl", "cascaded"])
@pytest.mark.parametrize("args", [{}, {"lora": 2}])
def test_a_party_learns_and_goes_on_elsewhere(
    strategy: str, args: dict[str, Any], folders: Path, context: Context
) -> None:
    party = a_party(folders / "distilbert", context, strategy, **args)
    before = {name: each.detach().clone() for name, each in party.learner.model.named_parameters()}
    expected = two_turns(context).arrays["embedding"]
    after = dict(party.learner.model.named_parameters())
    changed = {name for name, p in after.items() if not torch.equal(p, before[name])}
    learn = trained(party.learner.model).keys()
    assert changed <= learn and len(changed) > len(learn) / 2
    assert state.load_arrays(context.state, "model").keys() == (learn if args else before.keys())
    moved = Context(8, 2, context.node_config, state_from_bytes(state_to_bytes(context.state)), {})
    other = a_party(folders / "distilbert", Context(8, 2, {}, RecordDict(), {}), strategy, **args)
    other.in_process.model = None
    found = asked(moved, EvaluateOrder(exchange=4)).arrays["embedding"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_state_without_frozen_weights_is_refused_when_they_have_changed(
    folders: Path, tmp_path: Path, context: Context
) -> None:
    place = copy_of(folders, "distilbert", tmp_path)
    party = a_party(place, context, "cascaded", lora=2)
    asked(context, EvaluateOrder(exchange=1))
    then = about.read(party.about)

    def check(party: Party) -> None:
        builder._compare(("weights",), 0, then, about.read(party.about))

    check(a_party(place, context, "cascaded", lora=2))
    torch.manual_seed(5)
    transformers.AutoModel.from_config(configuration("distilbert")).save_pretrained(place)
    with pytest.raises(VflError, match="has other weights in its model's folder"):
        check(a_party(place, context, "cascaded", lora=2))


@pytest.mark.nightly
@pytest.mark.parametrize(("text", "least"), [([], 20e6), (["--text"], 60e6)], ids=["mlp", "text"])
def test_memory_is_that_of_the_model_gradient_and_optimizer(text: list[str], least: float) -> None:
    command = [sys.executable, "-m", "benchmarks.memory", *text]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    figures = json.loads(done.stdout.splitlines()[-1])
    most = {"cascaded": 1.3, "dpzv": 1.3, "split-nn": 2 + 0.3 + bool(text) * 0.5}
    for kind, times in {**most, "split-nn momentum": most["split-nn"] + 1}.items():
        assert figures[kind]["parameters"] > least
        assert figures[kind]["step_over_model"] < times
        assert figures[kind]["evaluation_over_model"] < times
    assert figures["split-nn"]["step_over_model"] > 1.9  # the control


# --- what is refused ----------------------------------------------------------------------------


def refused(place: Any, sample: Samples = TEXT, **args: Any) -> str:
    with pytest.raises(VflError) as error:
        Pretrained(str(place), sample, 5, **args)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path, folders: Path) -> None:
    for name in ("bert-base-uncased", "google/vit-base-patch16-224", "/nowhere"):
        assert "that does not exist here. Write hf:FOLDER" in refused(name)
    for args in ({"lora": -1}, {"lora": 1.5}, {"freeze": "yes"}):
        assert "Give a whole number for lora" in refused(folders / "vit", IMAGE, **args)
    with pytest.raises(ConfigError, match=r"^Party 1's model 'hf:nowhere' names a folder"):
        build_bottom(resolve({"bottom-model": "hf:nowhere"}), 1, TEXT, 5)
    assert "without a valid config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "without a valid config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert refused(tmp_path).startswith("cannot be built from")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "tf_model.h5"])
def test_weights_that_are_no_safetensors_are_refused(
    name: str, folders: Path, tmp_path: Path
) -> None:
    place = copy_of(folders, "distilbert", tmp_path)
    shutil.copy(place / "model.safetensors", place / name)
    Pretrained(str(place), TEXT, 5)  # beside safetensors they are not read
    (place / "model.safetensors").unlink()
    assert f"weights in {name} only, a format that can hold code. Save" in refused(place)


@pytest.mark.parametrize(
    "more",
    [
        {"auto_map": {"AutoModel": "modeling.Evil"}},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {"attn_implementation": "somebody/kernel"},
        {"backbone": "resnet50", "use_pretrained_backbone": True},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_configuration_that_asks_for_code_or_files_is_refused(
    more: dict[str, Any], folders: Path, tmp_path: Path
) -> None:
    place = copy_of(folders, "distilbert-bare", tmp_path)
    settings = json.loads((place / "config.json").read_text())
    Pretrained(str(place), TEXT, 5)
    (place / "config.json").write_text(json.dumps({**settings, **more}))
    assert f"its config.json has {next(iter(more))}, which asks for code" in refused(place)


def test_code_in_a_folder_would_run_if_it_were_trusted(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    dynamic: Any = import_module("transformers.dynamic_module_utils")
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    place = copy_of(folders, "distilbert-bare", tmp_path)
    (place / "modeling.py").write_text("raise SystemExit('it ran')")
    settings = json.loads((place / "config.json").read_text())
    settings["auto_map"] = {"AutoConfig": "modeling.Evil"}
    (place / "config.json").write_text(json.dumps(settings))
    with pytest.raises(SystemExit, match="it ran"):
        transformers.AutoConfig.from_pretrained(
            place, local_files_only=True, trust_remote_code=True
        )
    assert "its config.json has auto_map" in refused(place)


def test_adapters_to_a_model_elsewhere_are_refused(folders: Path, tmp_path: Path) -> None:
    place = copy_of(folders, "distilbert", tmp_path)
    (place / "adapter_config.json").write_text('{"base_model_name_or_path": "bert"}')
    assert "with adapters to a model that is elsewhere" in refused(place)


def test_weights_of_another_model_are_refused(folders: Path, tmp_path: Path) -> None:
    place = copy_of(folders, "bert", tmp_path)
    shutil.copy(folders / "vit" / "model.safetensors", place / "model.safetensors")
    assert "Save the weights and config.json of the same model" in refused(place)
    (place / "model.safetensors").write_bytes(b"\xff" * 100)
    assert refused(place).startswith("cannot be built from")


@pytest.mark.parametrize(
    ("kind", "sample", "said"),
    [
        ("distilbert", torch.zeros(7), "reads input_ids [L] of whole numbers"),
        ("distilbert", {**TEXT, "age": torch.zeros(())}, "cannot read 'age', which samples have"),
        ("distilbert", {"input_ids": torch.arange(30)}, "texts of up to 20 tokens, but a sample"),
        ("distilbert", {"input_ids": torch.arange(44, 54)}, "knows tokens 0 to 49, but a sample"),
        ("vit", IMAGE[:6], "reads images of 8 x 8, but a sample is 6 x 8. Resize them"),
        ("vit", IMAGE[..., 0], "reads images [height, width, 3], but a sample is (8, 8)"),
        ("resnet", torch.zeros(5), "reads images [height, width, 3], but a sample is (5,)"),
    ],
    ids=["floats", "another name", "too long", "other tokens", "size", "no colours", "no image"],
)
def test_samples_that_the_model_cannot_read_are_refused(
    kind: str, sample: Samples, said: str, folders: Path
) -> None:
    assert said in refused(folders / kind, sample)


@pytest.mark.parametrize("library", ["transformers", "peft"])
def test_a_library_that_is_missing_is_named_with_the_extra(
    library: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    said = refused(folders / "vit", IMAGE, lora=2)
    assert said.startswith(f"needs the {library} library") and "vfl-flower[hf]" in said


def test_the_network_is_shut_while_a_model_is_made(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a configuration may ask for."""
    hub: Any = sys.modules["huggingface_hub.constants"]
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    seen: list[bool] = []
    make = transformers.AutoModel.from_pretrained

    def watched(*given: Any, **more: Any) -> Any:
        seen.append(hub.is_offline_mode())
        assert more["local_files_only"] and more["use_safetensors"]
        assert not more["trust_remote_code"]
        return make(*given, **more)

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", watched)
    Pretrained(str(folders / "vit"), IMAGE, 5)
    assert seen == [True] and not hub.is_offline_mode()


@pytest.mark.parametrize("name", ["hf:/data/model", "hf:model", "hf:../model"])
def test_a_node_takes_no_folder_from_the_run_configuration(name: str) -> None:
    resolve({"bottom-model": name})  # in simulations it is taken
    with pytest.raises(ConfigError, match="bottom-model names code"):
        refuse_places({"bottom-model": name})


def test_a_folder_is_found_from_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_anywhere({"bottom-model": "hf:bert"})["bottom-model"] == f"hf:{tmp_path / 'bert'}"
    assert from_anywhere({"bottom-model": "mlp"})["bottom-model"] == "mlp"
