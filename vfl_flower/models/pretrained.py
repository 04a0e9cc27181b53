"""Models of the transformers library as bottom models: ``hf:FOLDER``.

The folder is on the party's own disk, and has the library's config.json and perhaps weights in
safetensors; without them a model begins at random, as any other. Nothing is looked up on a hub, no
code comes along, and nothing is unpickled. The model's pooled output goes through a linear layer to
the embedding size.

Samples of images are [H, W, C] or [H, W]; of texts, what a tokenizer makes of them by name:
``input_ids`` and ``attention_mask``, each [L].
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vfl_flower.config.errors import VflError
from vfl_flower.data import samples
from vfl_flower.data.samples import Samples


def pretrained(folder: str) -> Callable[..., Pretrained]:
    """What builds the model in a folder, from a sample and an embedding size."""
    return partial(Pretrained, folder)


class Pretrained(nn.Module):
    """A backbone with pooled output, and a linear layer to the embedding: ``forward(x)`` [R, size].

    Parameters
    ----------
    folder : with config.json, and perhaps model.safetensors.
    sample : one row as the source gives it, without a dimension of rows.
    size : of an embedding.
    lora : rank of adapters beside the backbone's linear layers (LoRA, Hu et al., 2022), which learn
        in its place; 0: none.
    freeze : whether the backbone learns nothing, and stays in eval mode.

    Raises
    ------
    VflError
        If the folder or the sample does not do; as the end of a sentence, whose subject is the
        model.
    """

    def __init__(
        self, folder: str, sample: Samples, size: int, lora: int = 0, freeze: bool = False
    ) -> None:
        super().__init__()
        if type(lora) is not int or lora < 0 or type(freeze) is not bool:
            raise VflError("has lora, a whole number, and freeze, true or false: correct them.")
        place = Path(folder).expanduser()
        settings = _settings(place)
        weights = sorted(place.glob("*.safetensors"))
        self.frozen = freeze
        self.backbone, whole = _backbone(place, bool(weights))
        self.reads = set(inspect.signature(self.backbone.forward).parameters)
        _check_sample(self.named(sample), self.reads, self.backbone.config)
        if freeze or lora:
            self.backbone.requires_grad_(False)
        if lora:
            _add_adapters(self.backbone, lora)
        # Digest of the files from which frozen parameters can be read again, so that no state
        # needs to hold them.
        self.digest_of_files = _digest(settings, weights) if whole and (freeze or lora) else ""
        two = samples.each(sample, lambda x: torch.stack([x, x]))
        self.eval()
        with torch.no_grad():
            width = self.pooled(two).shape[1]
        self.train()
        self.head = nn.Linear(width, size)

    def forward(self, x: Samples) -> Tensor:
        """Embeddings [R, size]."""
        embeddings: Tensor = self.head(self.pooled(x))
        return embeddings

    def pooled(self, x: Samples) -> Tensor:
        """The backbone's own pooled output, or else the mean over tokens, [R, width]."""
        named = self.named(x)
        if "pixel_values" in named:
            images = named["pixel_values"]
            images = images.unsqueeze(-1) if images.dim() == 3 else images
            named["pixel_values"] = images.permute(0, 3, 1, 2)
        outputs = self.backbone(**named)
        pooled: Tensor | None = outputs.get("pooler_output")
        if pooled is not None:
            return pooled.flatten(1)
        states: Tensor = outputs.last_hidden_state  # [R, L, width], or of images [R, width, H, W]
        if states.dim() == 4:
            return states.mean((2, 3))
        mask = named.get("attention_mask")
        if mask is None:
            return states.mean(1)
        held = mask[..., None].to(states.dtype)
        return (states * held).sum(1) / held.sum(1).clamp_min(1)

    def named(self, x: Samples) -> dict[str, Tensor]:
        """Samples by the names that the backbone knows them by."""
        return dict(x) if isinstance(x, dict) else {self.backbone.main_input_name: x}

    def train(self, mode: bool = True) -> Pretrained:
        """Set the mode; a frozen backbone stays in eval mode."""
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self


# --- the folder ---------------------------------------------------------------------------------

_OTHER_WEIGHTS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt*", "*.h5", "*.msgpack")


def _settings(place: Path) -> bytes:
    """The content of config.json, if nothing in the folder is refused."""
    if not place.is_dir():
        raise VflError(
            "is to be read from a folder that is not here: write hf:FOLDER, with a folder "
            "that has config.json; nothing is fetched from a hub."
        )
    try:
        content = (place / "config.json").read_bytes()
        settings = json.loads(content)
        kind = settings["model_type"]
    except (OSError, ValueError, TypeError, KeyError):
        raise VflError(
            "is to be read from a folder that has no config.json of the transformers library: "
            "write it with save_pretrained."
        ) from None
    refused = [name for name in ("auto_map", "quantization_config") if name in settings]
    refused += [name for name in ("backbone", "use_timm_backbone") if settings.get(name)]
    for name, value in settings.items():  # kernels of a hub are named so
        refused += [name] * (name.endswith("_implementation") and "/" in str(value))
    if refused:
        raise VflError(
            f"is a {kind} whose config.json has {refused[0]}, which asks for code or files from "
            "elsewhere: save a model without it."
        )
    if (place / "adapter_config.json").exists():
        raise VflError(
            "is to be read from a folder that has adapters to a model that is elsewhere: merge "
            "them, by merge_and_unload, and save the whole model."
        )
    others = sorted(each.name for pattern in _OTHER_WEIGHTS for each in place.glob(pattern))
    if others and not any(place.glob("*.safetensors")):
        raise VflError(
            f"is to be read from a folder whose weights are in {others[0]} alone: save them as "
            "safetensors, by save_pretrained, since nothing is read that can hold code."
        )
    return content


def _backbone(place: Path, weights: bool) -> tuple[Any, bool]:
    """The model in a folder, and whether its files have all of its weights."""
    transformers = _library("transformers")
    with _alone(transformers):
        try:
            config = transformers.AutoConfig.from_pretrained(
                place, local_files_only=True, trust_remote_code=False
            )
            config.return_dict = True
            if not weights:
                made = transformers.AutoModel.from_config(
                    config, dtype=torch.float32, trust_remote_code=False
                )
                return made, False
            made, report = transformers.AutoModel.from_pretrained(
                place,
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # the library and its parts raise many
            said = " ".join(str(error).split())[:200]
            raise VflError(f"cannot be made of what {place} has: {said}") from error
    missing = sorted(report["missing_keys"])
    lost = [name for name in missing if "pooler" not in name]  # which many are trained without
    if lost:
        raise VflError(
            f"has no {lost[0]!r} among the weights in {place}: they are of another model than its "
            "config.json."
        )
    return made, not missing


def _digest(settings: bytes, weights: list[Path]) -> str:
    digest = hashlib.sha256(settings)
    for path in weights:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise VflError(
            f"needs the {name} library, which is not installed here: pip install 'vfl-flower[hf]'."
        ) from None


@contextmanager
def _alone(transformers: Any) -> Iterator[None]:
    """Have the library reach no hub, whatever a configuration asks for, and say nothing."""
    hub: Any = import_module("huggingface_hub.constants")
    logging = transformers.utils.logging
    offline, level = hub.HF_HUB_OFFLINE, logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    hub.HF_HUB_OFFLINE = True
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = offline
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# --- samples and adapters -----------------------------------------------------------------------


def _check_sample(sample: dict[str, Tensor], reads: set[str], config: Any) -> None:
    """Raise `VflError` if rows like this one are none that the backbone can read."""
    unknown = sorted(sample.keys() - reads)
    if unknown:
        raise VflError(f"reads {', '.join(sorted(reads))}, and no {unknown[0]!r} as samples have.")
    for name in ("input_ids", "attention_mask"):
        if name in sample and (sample[name].is_floating_point() or sample[name].dim() != 1):
            raise VflError(
                f"reads {name} [L] of whole numbers, as a tokenizer gives them, and a sample's are "
                f"{str(sample[name].dtype).removeprefix('torch.')} "
                f"{tuple(sample[name].shape)}."
            )
    if "input_ids" in sample:
        ids, most = sample["input_ids"], getattr(config, "max_position_embeddings", None)
        if most and len(ids) > most:
            raise VflError(
                f"reads texts of up to {most} tokens, and a sample has {len(ids)}: have the "
                "tokenizer cut them."
            )
        words = getattr(config, "vocab_size", None)
        if words and len(ids) and not 0 <= ids.min() <= ids.max() < words:
            raise VflError(
                f"knows tokens 0 to {words - 1}, and a sample has others: use its own tokenizer."
            )
    if "pixel_values" in sample:
        image = tuple(sample["pixel_values"].shape)
        channels, due = getattr(config, "num_channels", None), getattr(config, "image_size", None)
        has = image[2] if len(image) == 3 else 1
        if len(image) not in (2, 3) or (channels and has != channels):
            raise VflError(
                f"reads images [height, width, {channels}], and a sample is {image}: convert them."
            )
        due = (due, due) if isinstance(due, int) else due
        # Those that look at an image as a whole take any size.
        if due and hasattr(config, "patch_size") and image[:2] != tuple(due):
            raise VflError(
                f"reads images of {due[0]} x {due[1]}, and a sample is {image[0]} x {image[1]}: "
                "resize them."
            )


def _add_adapters(backbone: nn.Module, rank: int) -> None:
    """Adapters beside all linear layers; where there are none, beside convolutions."""
    peft = _library("peft")
    of = {kind: _names(backbone, kind) for kind in (nn.Linear, nn.Conv2d)}
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=of[nn.Linear] or of[nn.Conv2d]
    )
    peft.inject_adapter_in_model(config, backbone)


def _names(module: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, each in module.named_modules() if isinstance(each, kind)]
