"""Models of Hugging Face's transformers: built from a configuration on disk, and made ready for an export.

Nothing is downloaded and no code of a configuration's folder is run. Called under torch's meta device, a model of any
size takes no memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automap.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn

PREFIX = "hf:"
"""How the name of a configuration begins: `hf:PATH[:key=value,...]`."""
INSTALL = "pip install 'transformers>=5,<6'"
"""The command that installs what this module needs: the extra `hf` of pyproject.toml."""
MOST_TOKENS = 8192
"""Tokens of a sample unless the user says otherwise (assumed): models that take more were pretrained with 4,096 or
8,192 (Llama 2 and 3, Qwen2), and got longer samples at the end only."""
IMAGE_SIZE = 224
"""Height and width of an image where the configuration names none, as that of ResNet: those of ImageNet's training."""
T5_TOKENS = 512
"""Tokens of a sample of a model whose positions have no limit: those of T5's pretraining."""
SOUND_SAMPLES = 16_000 * 15
"""Samples of a sound that a model reads as a wave: 15 seconds at 16 kHz, about the longest pieces of wav2vec 2.0's
pretraining (assumed)."""
IMAGES = ("pixel_values", "pixel_values_videos")
"""Names of inputs that are images or videos."""
COLOURS = 3
"""Channels of an image where the configuration names none."""
CHANNELS = ("num_channels", "in_chans")
"""Names under which configurations say how many channels an image has."""
_HEADS = (
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES",
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "MODEL_FOR_MASK_GENERATION_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
)  # fmt: skip
"""Tables of transformers from a model type to the class that trains it, in the order of preference: what models were
pretrained for. They hold the class of a configuration that names none, or the body of one alone."""


def is_transformers(module: nn.Module) -> bool:
    """Whether a module is a model of transformers; does not import it."""
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(module).__mro__)


def without_cache(module: nn.Module) -> None:
    """Lets a model of transformers keep no keys and values for later tokens, which training has no use for."""
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def as_trained(module: nn.Module) -> None:
    """Sets a model of transformers up as training runs it, with kernels that can be exported.

    Experts are one product over all of them, and attention is torch's.
    """
    without_cache(module)
    model: Any = module
    if model.config._attn_implementation not in ("eager", "sdpa"):
        model.set_attn_implementation("sdpa")
    # The default kernels for experts have no translation to ONNX, or loop over the experts that got tokens. A model
    # without experts refuses to be asked, and so does one of transformers 4.
    with contextlib.suppress(ValueError, AttributeError):
        model.set_experts_implementation("batched_mm")


def example_inputs(module: nn.Module, seq_len: int | None = None) -> dict[str, Tensor]:
    """Inputs of one sample, by name.

    Args:
        module: a model of transformers.
        seq_len: tokens of the sample; None = as many as the model has positions, at most `MOST_TOKENS`.

    Raises:
        ModelError: the model reads neither tokens, nor images, nor sounds, nor a series of numbers alone.
    """
    import torch

    model: Any = module
    config, main = model.config, model.main_input_name
    main, *others = [main] if isinstance(main, str) else main
    found: dict[str, Tensor] = {}
    if main == "input_ids":
        found[main] = torch.zeros(1, _tokens(module, seq_len), dtype=torch.int64)
    elif (shape := _image(config) if main in IMAGES else _sound(config, main) or _series(config, main)) is not None:
        found[main] = torch.zeros(1, *shape)
    elif main == "past_values" and hasattr(config, "lags_sequence"):
        found |= _forecast(config)
    if found and "task_inputs" in others:  # OneFormer reads the name of its task
        found["task_inputs"] = torch.zeros(1, config.task_seq_len, dtype=torch.int64)
    if found and _has_two_encoders(module):
        found.setdefault("input_ids", torch.zeros(1, _tokens(module, seq_len), dtype=torch.int64))
        found.setdefault("pixel_values", torch.zeros(1, *(_image(config) or ())))
    if "input_ids" in found and "pixel_values" not in found and _demands_images(module, found):
        found["pixel_values"] = torch.zeros(1, *(_image(config) or ()))
    if "pixel_values" in found and "input_ids" not in found and _demands_tokens(module, found):
        found["input_ids"] = torch.zeros(1, _tokens(module, seq_len), dtype=torch.int64)
    if not found:
        repair = "Write a function that returns the model and its inputs, for `automap export-onnx FILE.py:FUNCTION`."
        raise ModelError("its inputs are not known", field="model", value=type(module).__name__, repair=repair)
    if config.is_encoder_decoder and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        found["decoder_input_ids"] = torch.zeros(1, _tokens(module, seq_len), dtype=torch.int64)
    elif seq_len is not None and "input_ids" not in found:
        repair = "Leave it out; image_size says how large images are."
        raise ModelError("the model reads no tokens", field="seq_len", value=seq_len, repair=repair)
    return found


def quantised(module: nn.Module) -> str:
    """A sentence about weights that the configuration of a model of transformers stores quantised; empty where none."""
    model: Any = module
    parts = [getattr(model.config, name, None) for name in (*model.config.sub_configs, "backbone_config")]
    said = next((s for part in (model.config, *parts) if (s := getattr(part, "quantization_config", None))), None)
    if said is None:
        return ""
    document = said if isinstance(said, dict) else said.to_dict()
    method = str(document.get("quant_method", "a method that it does not name"))[:40]
    return (
        f"the configuration stores quantised weights ({method}): the plan trains all of them in the precision of the "
        "training settings, as floating-point numbers. If they stay as they are and adapters are trained, export the "
        "model with the adapters, and read the memory of the frozen weights as an upper bound."
    )


def with_mask(module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs with a mask of padding that shows every token, for models that make none of their own in an export.

    Empty where that changes nothing: the module is none of transformers, reads no mask, or was given one.
    """
    import torch

    tokens = inputs.get("input_ids")
    reads = (
        tokens is not None
        and is_transformers(module)
        and "attention_mask" in inspect.signature(module.forward).parameters
    )
    if not reads or "attention_mask" in inputs:
        return {}
    return {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}


def _image(config: Any) -> tuple[int, ...] | None:
    """`(channels, height, width)` of an image, or `(frames, ...)` of a video; None where no part of the configuration
    says how many channels or how large images are."""
    parts = [getattr(config, name, None) for name in ("vision_config", "backbone_config", "encoder")]
    own = next((part for part in (config, *parts) if isinstance(_said(part, *CHANNELS), int)), None)
    if own is None:  # BLIP and TextNet do not say that images have colours
        own = next((part for part in (config, *parts) if _said(part, "image_size") is not None), None)
    if own is None:
        return None
    height, width = _pair(_said(own, "image_size", "crop_size") or IMAGE_SIZE)
    # Models of videos take frames before channels.
    frames = _said(own, "num_frames", "frames_per_clip")
    return (*([frames] if isinstance(frames, int) else []), _said(own, *CHANNELS) or COLOURS, height, width)


def _said(config: Any, *names: str) -> Any:
    """What a configuration says under the first of the names that it has; None where it has none."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _sound(config: Any, main: str) -> tuple[int, ...] | None:
    """The shape of a sound as an input of the name `main`: a spectrogram or a wave; None where it is not sound."""
    if main == "input_features" and hasattr(config, "max_source_positions"):
        if hasattr(config, "input_feat_per_channel"):  # Speech2Text has frames before bands
            return config.max_source_positions, config.input_feat_per_channel
        return config.num_mel_bins, 2 * config.max_source_positions  # Whisper's first convolutions halve the frames
    if main == "input_values" and hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):
        return config.max_length, config.num_mel_bins
    if main == "input_values" and hasattr(config, "audio_channels"):  # EnCodec keeps the channels apart
        return config.audio_channels, SOUND_SAMPLES
    return (SOUND_SAMPLES,) if main == "input_values" else None


def _series(config: Any, main: str) -> tuple[int, int] | None:
    """`(times, channels)` of a series of numbers as an input of the name `main`; None where it is none."""
    if main == "past_values" and hasattr(config, "num_input_channels"):
        return config.context_length, config.num_input_channels
    return None


def _forecast(config: Any) -> dict[str, Tensor]:
    """Inputs of a model that forecasts a series of numbers from values a few times back, as Informer, by name."""
    import torch

    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    channels = () if config.input_size == 1 else (config.input_size,)
    found = {"past_values": (past, *channels), "past_observed_mask": (past, *channels)}
    found |= {"past_time_features": (past, config.num_time_features), "future_values": (future, *channels)}
    found |= {"future_time_features": (future, config.num_time_features)}
    if config.num_static_real_features:
        found["static_real_features"] = (config.num_static_real_features,)
    made = {name: torch.zeros(1, *shape) for name, shape in found.items()}
    if config.num_static_categorical_features:
        made["static_categorical_features"] = torch.zeros(1, config.num_static_categorical_features, dtype=torch.int64)
    return made


def _demands_images(module: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    """Whether a model that reads tokens refuses to run without an image, as ViLT does; LLaVA runs on texts alone."""
    import torch

    if "pixel_values" not in inspect.signature(module.forward).parameters or _image(module.config) is None:
        return False
    try:
        with torch.no_grad():
            module(**inputs)
    except ValueError as fault:
        return "pixel_values" in str(fault)
    except Exception:
        return False  # the export says what is wrong
    return False


def _demands_tokens(module: nn.Module, inputs: Mapping[str, Tensor]) -> bool:
    """Whether a model that reads images does not run without a text, as BLIP's that write captions."""
    import torch

    if "input_ids" not in inspect.signature(module.forward).parameters:
        return False
    try:
        with torch.no_grad():
            module(**inputs)
    except Exception:
        return True
    return False


def _has_two_encoders(module: nn.Module) -> bool:
    """Whether a model compares texts with images, as CLIP, which is trained on pairs of them."""
    from transformers.models.auto import modeling_auto

    table = modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES
    return type(module).__name__ in table.values()


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return height, width


def _tokens(module: nn.Module, seq_len: int | None) -> int:
    model: Any = module
    config = model.config
    names = (
        "max_target_positions", "max_position_embeddings", "max_decoder_position_embeddings", "max_seq_len",
    )  # fmt: skip
    # A multimodal model keeps those of its texts in a configuration of their own. XLNet says -1: any number.
    parts = (config, getattr(config, "text_config", None), getattr(config, "decoder", None))
    said = [getattr(part, name, None) for name in names for part in parts]
    most = next((n for n in said if isinstance(n, int) and n > 0), None)
    # RoBERTa and its kin count positions from behind the padding token's number.
    if most is not None and any(hasattr(part, "create_position_ids_from_input_ids") for part in module.modules()):
        most -= next(n for part in parts if isinstance(n := getattr(part, "pad_token_id", None), int)) + 1
    if seq_len is None:
        return T5_TOKENS if most is None else min(most, MOST_TOKENS)
    if seq_len < 1 or (most is not None and seq_len > most):
        repair = "Give at least 1." if most is None else f"Give 1 to {most}, the positions of the configuration."
        raise ModelError("not a length of its samples", field="seq_len", value=seq_len, repair=repair)
    return seq_len


def from_config(spec: str, num_samples: int = 1) -> Callable[[], tuple[nn.Module, dict[str, Tensor]]]:
    """What builds the model of a configuration, for `automap.runtime.torch_export.export_onnx`.

    Args:
        spec: `[hf:]PATH[:key=value,...]`: a folder with a config.json, or such a file; keys are `seq_len`, the tokens
            of a sample, or numbers of the configuration, which are replaced.
        num_samples: the number of samples of the example inputs.

    Raises:
        ModelError: no such file, a key or a kind of model that is not known, or transformers is not installed.
    """
    path, changes = _parse(spec.removeprefix(PREFIX))
    document = _read(path)
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            "transformers is not installed", field="model", value=spec, repair=f"Install it: {INSTALL}"
        )  # fmt: skip
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    seq_len = changes.pop("seq_len", None)
    for key in changes:
        if not isinstance(document.get(key), int | float):
            numbers = ", ".join(key for key, value in document.items() if isinstance(value, int | float))
            repair = f"Use seq_len, or a number of the configuration: {numbers}."
            raise ModelError("not a number of the configuration", field="model", value=key, repair=repair)
    kind = document.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ModelError(
            f"transformers {transformers.__version__} has no such kind of model, and code of the folder is not run",
            field="model_type", value=kind,
            repair="Install a release of transformers that has it, or export the model: automap export-onnx.",
        )  # fmt: skip
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict({**document, **changes})
    except Exception as fault:
        raise _not_accepted(path, fault) from None
    chosen = _class(config, transformers, has_code="auto_map" in document)

    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        try:
            module = chosen(config)
        except Exception as fault:
            raise _not_accepted(path, fault) from None
        inputs = example_inputs(module, seq_len)
        return module, {name: x.repeat(num_samples, *[1] * (x.dim() - 1)) for name, x in inputs.items()}

    return build


def _not_accepted(path: Path, fault: Exception) -> ModelError:
    text = f"transformers does not accept the configuration ({' '.join(str(fault).split())[:200]})"
    repair = "Correct the file as the documentation of transformers says."
    return ModelError(text, field="model", value=str(path), repair=repair)


def name_of(spec: str) -> str:
    """The name of a configuration's model: the name of its folder or file."""
    path, _ = _parse(spec.removeprefix(PREFIX))
    path = path.resolve()
    return path.parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else path.name


def _parse(text: str) -> tuple[Path, dict[str, Any]]:
    head, colon, tail = text.rpartition(":")
    if not colon or "=" not in tail:
        return Path(text), {}
    changes: dict[str, Any] = {}
    for part in tail.split(","):
        key, _, value = part.partition("=")
        try:
            changes[key] = json.loads(value)
        except ValueError:
            changes[key] = value
        if not isinstance(changes[key], int | float) or (key == "seq_len" and type(changes[key]) is not int):
            repair = "Write numbers, as in hf:FOLDER:seq_len=4096,num_hidden_layers=8."
            raise ModelError("not a number", field=key or "model", value=value, repair=repair)
    return Path(head), changes


def _number_of(held: dict[str, Any]) -> Any:
    """The number that transformers writes as an object, since JSON has no infinity; any other object as it is."""
    return float(held["__float__"]) if held.keys() == {"__float__"} else held


def _read(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_text("utf-8"), object_hook=_number_of)
    except OSError as fault:
        raise ModelError(
            f"cannot be read ({fault.strerror}); nothing is downloaded", field="model", value=str(file),
            repair="Give a folder with a config.json, or such a file; `hf download NAME config.json` fetches one.",
        ) from None  # fmt: skip
    except ValueError as fault:
        repair = "Give the config.json of a model of transformers."
        raise ModelError(f"not JSON ({fault})", field="model", value=str(file), repair=repair) from None
    if not isinstance(document, dict):
        repair = "Give the config.json of a model of transformers."
        raise ModelError("not a JSON object", field="model", value=str(file), repair=repair)
    return document


def _class(config: Any, transformers: Any, *, has_code: bool) -> Any:
    """The class that the configuration names; in place of a body without a head, the class that trains it.

    Args:
        config: the configuration.
        transformers: the library.
        has_code: whether the configuration says that a class may be defined by code of its folder.
    """
    from transformers.models.auto import modeling_auto

    tables = [getattr(modeling_auto, name) for name in _HEADS]
    bodies = modeling_auto.MODEL_MAPPING_NAMES.get(config.model_type)
    named = config.architectures or ()
    for name in named:
        found = getattr(transformers, name, None)
        if inspect.isclass(found) and name not in ((bodies,) if isinstance(bodies, str) else bodies or ()):
            return found
    name = next((table[config.model_type] for table in tables if config.model_type in table), None)
    name = name[0] if isinstance(name, tuple) else name  # of LeViT, without its teacher
    if name is None:
        raise ModelError(
            "no class of transformers trains it", field="architectures", value=config.architectures,
            repair="Name one in the configuration, or export the model: automap export-onnx FILE.py:FUNCTION.",
        )  # fmt: skip
    # Some folders name a class as it was called before transformers had it: MPTForCausalLM, now MptForCausalLM.
    if has_code and named and not any(hasattr(transformers, n) or n.lower() == name.lower() for n in named):
        raise ModelError(
            f"the class is none of transformers {transformers.__version__}, and code of the folder is not run",
            field="architectures", value=named, repair="Export the model: automap export-onnx FILE.py:FUNCTION.",
        )  # fmt: skip
    return getattr(transformers, name)
