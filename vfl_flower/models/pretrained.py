"""Use models of the transformers library as bottom models: ``hf:FOLDER``.

The party's folder holds the library's config.json and perhaps weights in safetensors. Without
weights the model starts from random parameters. No hub is contacted, no code is loaded, and nothing
is unpickled. A sample is an image [H, W, C] or [H, W], or a tokenizer's output by name:
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
from os.path import expanduser, isdir
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vfl_flower.config.errors import VflError
from vfl_flower.data import samples
from vfl_flower.data.samples import Samples


def pretrained(folder: str) -> Callable[..., Pretrained]:
    """Return a function that builds a folder's model from a sample and a size."""
    return partial(Pretrained, folder)


class Pretrained(nn.Module):
    """Map samples to embeddings [R, size] by a pooled backbone and a linear layer.

    With adapters of rank ``lora`` (Hu et al., 2022), only they and the last layer learn. With
    ``freeze``, the backbone stays in eval mode. Errors lack their subject, the model.
    """

    def __init__(
        self, folder: str, sample: Samples, size: int, lora: int = 0, freeze: bool = False
    ) -> None:
        super().__init__()
        if type(lora) is not int or lora < 0 or type(freeze) is not bool:
            raise VflError(
                f"has lora={lora!r} and freeze={freeze!r}. Give a whole number for lora, and true "
                "or false for freeze."
            )
        place = Path(expanduser(folder))
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
        # A state holds this digest instead of frozen parameters, which the files hold anyway.
        self.digest_of_files = _digest(settings, weights) if whole and (freeze or lora) else ""
        two = samples.each(sample, lambda x: torch.stack([x, x]))
        self.eval()
        with torch.no_grad():
            width = self.pooled(two).shape[1]
        self.train()
        self.head = nn.Linear(width, size)

    def forward(self, x: Samples) -> Tensor:
        """Return embeddings [R, size]."""
        return self.head(self.pooled(x))

    def pooled(self, x: Samples) -> Tensor:
        """Return the backbone's pooled output, or the mean over tokens, [R, width]."""
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
        """Return samples by the names of the backbone's arguments."""
        return dict(x) if isinstance(x, dict) else {self.backbone.main_input_name: x}

    def train(self, mode: bool = True) -> Pretrained:
        """Set the mode, except that a frozen backbone stays in eval mode."""
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self


_OTHER_WEIGHTS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt*", "*.h5", "*.msgpack")


def _settings(place: Path) -> bytes:
    """Return the content of config.json, if the folder passes all checks."""
    if not isdir(place):
        raise VflError(
            "names a folder that does not exist here. Write hf:FOLDER with a local folder "
            "that has config.json. Nothing is fetched from a hub."
        )
    try:
        content = (place / "config.json").read_bytes()
        settings = json.loads(content)
        kind = settings["model_type"]
    except (OSError, ValueError, TypeError, KeyError):
        raise VflError(
            "names a folder without a valid config.json of the transformers library. "
            "Write it with save_pretrained."
        ) from None
    refused = [name for name in ("auto_map", "quantization_config") if name in settings]
    refused += [name for name in ("backbone", "use_timm_backbone") if settings.get(name)]
    kernels = [name for name, value in settings.items() if "/" in str(value)]  # on a hub
    refused += [name for name in kernels if name.endswith("_implementation")]
    if refused:
        raise VflError(
            f"is a {kind}, and its config.json has {refused[0]}, which asks for code or files "
            "from elsewhere. Save a model without it."
        )
    if (place / "adapter_config.json").exists():
        raise VflError(
            "names a folder with adapters to a model that is elsewhere. Merge "
            "them with merge_and_unload, and save the whole model."
        )
    others = sorted(each.name for pattern in _OTHER_WEIGHTS for each in place.glob(pattern))
    if others and not any(place.glob("*.safetensors")):
        raise VflError(
            f"names a folder with weights in {others[0]} only, a format that can hold code. Save "
            "them as safetensors, with save_pretrained."
        )
    return content


def _backbone(place: Path, weights: bool) -> tuple[Any, bool]:
    """Return the model in a folder, and whether its files have all of its weights."""
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
        except Exception as error:  # the library raises many types
            said = " ".join(str(error).split())[:200]
            raise VflError(f"cannot be built from {place}: {said}") from error
    missing = sorted(report["missing_keys"])
    if lost := [name for name in missing if "pooler" not in name]:
        raise VflError(
            f"has no {lost[0]!r} among the weights in {place}. Save the weights and config.json "
            "of the same model."
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
            f"needs the {name} library, which is not installed. Run: pip install 'vfl-flower[hf]'."
        ) from None


@contextmanager
def _alone(transformers: Any) -> Iterator[None]:
    """Keep the library offline and silent inside the context."""
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


def _check_sample(sample: dict[str, Tensor], reads: set[str], config: Any) -> None:
    """Refuse rows like this one, if the backbone cannot read them."""
    if unknown := sorted(sample.keys() - reads):
        raise VflError(
            f"cannot read {unknown[0]!r}, which samples have. It reads {', '.join(sorted(reads))}: "
            "rename or leave out the others."
        )
    for name in ("input_ids", "attention_mask"):
        if name in sample and (sample[name].is_floating_point() or sample[name].dim() != 1):
            raise VflError(
                f"reads {name} [L] of whole numbers, but a sample has "
                f"{str(sample[name].dtype).removeprefix('torch.')} "
                f"{tuple(sample[name].shape)}. Use the output of a tokenizer."
            )
    if "input_ids" in sample:
        ids, most = sample["input_ids"], getattr(config, "max_position_embeddings", None)
        if most and len(ids) > most:
            raise VflError(
                f"reads texts of up to {most} tokens, but a sample has {len(ids)}. Truncate texts "
                "in the tokenizer."
            )
        words = getattr(config, "vocab_size", None)
        if words and len(ids) and not 0 <= ids.min() <= ids.max() < words:
            raise VflError(
                f"knows tokens 0 to {words - 1}, but a sample has others. Use this model's "
                "tokenizer."
            )
    if "pixel_values" in sample:
        image = tuple(sample["pixel_values"].shape)
        channels, due = getattr(config, "num_channels", None), getattr(config, "image_size", None)
        has = image[2] if len(image) == 3 else 1
        if len(image) not in (2, 3) or (channels and has != channels):
            raise VflError(
                f"reads images [height, width, {channels}], but a sample is {image}. Convert them."
            )
        due = (due, due) if isinstance(due, int) else due
        # Only models with patches need one image size.
        if due and hasattr(config, "patch_size") and image[:2] != tuple(due):
            raise VflError(
                f"reads images of {due[0]} x {due[1]}, but a sample is {image[0]} x {image[1]}. "
                "Resize them."
            )


def _add_adapters(backbone: nn.Module, rank: int) -> None:
    """Add adapters beside all linear layers, or beside convolutions if none is linear."""
    peft = _library("peft")
    linear, convolutions = (
        [name for name, each in backbone.named_modules() if isinstance(each, kind)]
        for kind in (nn.Linear, nn.Conv2d)
    )
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear or convolutions)
    peft.inject_adapter_in_model(config, backbone)
