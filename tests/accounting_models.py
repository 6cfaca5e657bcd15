"""Models that transformers builds, on the meta device, beside their configs as saving would write them."""

import gc
import importlib
import warnings
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

from moeffn.accounting.families_encoders import ENCODERS

gc.freeze()  # what was imported stays; looking through it for cycles took 1.7 of 8.4 s of the tests of live models

ORDER = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)

# Where no automatic class, or one of several classes for a config, builds what is counted.
NAMED = {
    "funnel": "FunnelModel", "musicgen": "MusicgenForConditionalGeneration", "rag": "RagModel",
    "musicgen_decoder": "MusicgenForCausalLM", "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
    "musicgen_melody_decoder": "MusicgenMelodyForCausalLM", "timesfm": "TimesFmModelForPrediction",
    "timesfm2_5": "TimesFm2_5ModelForPrediction", "clvp": "ClvpModelForConditionalGeneration",
    "blip_text_model": "BlipTextLMHeadModel", "evolla": "EvollaForProteinText2Text", "parakeet_ctc": "ParakeetForCTC",
    "lasr_ctc": "LasrForCTC", "blt_patcher": "BltPatcher", "omniasr_ctc": "OmniASRForCTC",
    "nemotron3_diarization": "Nemotron3DiarizationForAudioFrameClassification",
    "pocket_tts": "PocketTTSForConditionalGeneration",
    "gradium_phonon_tts": "GradiumPhononTTSForConditionalGeneration",
}


def build(config):
    """The model with its head, of an encoder without."""
    if config.model_type in NAMED:
        with torch.device("meta"):
            return getattr(_beside(config), NAMED[config.model_type])(config)
    for kind in (AutoModel,) if config.model_type in ENCODERS else ORDER:
        if type(config) in kind._model_mapping:
            with torch.device("meta"), ExitStack() as stack:
                for plain in (nn.Linear, nn.Embedding):  # nothing to initialise; trying to takes a quarter of the time
                    stack.enter_context(patch.object(plain, "reset_parameters", lambda self: None))
                return kind.from_config(config)
    with torch.device("meta"):
        return _own_class(config)(config)


def _beside(config):
    return importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))


def _own_class(config):
    """The class beside the config's own that no automatic class names."""
    beside = vars(_beside(config))
    for ending in ("ForCausalLM", "ForConditionalGeneration", "TextModel", "Model", "Encoder", "Decoder", "Transformer",
                   "ForRetrieval", "ForDecision", "Resampler"):
        for name, cls in beside.items():
            if getattr(cls, "config_class", None) is type(config) and name.endswith(ending) and "PreT" not in name:
                return cls
    raise LookupError(f"transformers builds no model from {type(config).__name__}")


def whole(name, changes):
    """The live model and its config in full."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(name, **changes)
        return build(config), config.to_dict()
