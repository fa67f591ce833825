"""
Registration of the architectures with transformers and PEFT.

transformers' Auto classes take as long to import as torch does, so registration waits until they are imported.
Then it adds import paths to their tables: our classes are imported when they are looked up, like transformers' own.
"""

import functools
import importlib
import importlib.abc
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from types import ModuleType
from typing import Any

from ..models import REGISTRY
from ..models.architecture import Architecture
from ..quantization.methods import METHODS
from .foreign_files import GGUF


class LazyClasses(MutableMapping):
    """
    The entries of one of transformers' tables: classes of others, and import paths of our classes.

    Args:
        registered: the existing entries of the table.
        paths: key to the path of our class. A key that is itself a class is given by its path.
    """

    def __init__(self, registered: MutableMapping, paths: dict[str, str]):
        self.registered, self.paths = dict(registered), paths

    def __contains__(self, key: Hashable) -> bool:
        return key in self.registered or _path(key) in self.paths

    def __getitem__(self, key: Hashable) -> Any:
        if key not in self.registered and _path(key) in self.paths:
            self.registered[key] = _load(self.paths[_path(key)])
        return self.registered[key]

    def __setitem__(self, key: Hashable, value: Any) -> None:
        self.registered[key] = value

    def __delitem__(self, key: Hashable) -> None:
        self[key]  # raises a KeyError if there is none
        del self.registered[key]
        self.paths.pop(_path(key), None)

    def __iter__(self) -> Iterator:
        registered = list(self.registered)
        ours = self.paths.keys() - {_path(key) for key in registered}
        return iter(registered + [_load(path) if "." in path else path for path in self.paths if path in ours])

    def __len__(self) -> int:
        return len(self.registered.keys() | self.paths.keys() - {_path(key) for key in self.registered})


def _path(key: Hashable) -> Hashable:
    return f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else key


def _load(path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _add(mapping: Any, paths: dict[str, str]) -> None:
    """Adds our classes to one of transformers' mappings."""
    if not isinstance(mapping._extra_content, LazyClasses):
        mapping._extra_content = LazyClasses(mapping._extra_content, paths)


def _by_configuration(paths: dict[str, str]) -> dict[str, str]:
    """The same import paths, by configuration class instead of by model type."""
    return {REGISTRY[name].path(REGISTRY[name].config): path for name, path in paths.items()}


def _register_configurations(module: ModuleType) -> None:
    mapping = module.CONFIG_MAPPING
    if isinstance(mapping._extra_content, LazyClasses):
        return
    owners = {name: mapping[name].__module__.split(".")[0] for name in REGISTRY if name in mapping}
    if owners:
        names = ", ".join(f"{name} of {owner}" for name, owner in owners.items())
        warnings.warn(f"subquad replaces the registration of {names}.", stacklevel=2)
    for name in owners:
        mapping._extra_content.pop(name, None)
    paths = {name: architecture.path(architecture.config) for name, architecture in REGISTRY.items()}
    for architecture in REGISTRY.values():
        others = (name for name, fields in architecture.other_types.items() if not fields)
        paths |= dict.fromkeys(others, architecture.path(architecture.config))
    _add(mapping, paths)


def _share_type(module: ModuleType, model_type: str, fields: dict[str, Any], architecture: Architecture) -> None:
    """
    Makes transformers' configuration of a model type hand files with certain fields to ours. Its own model would
    initialise their weights randomly. A later version may know the fields itself.
    """
    config_class = next(each for each in vars(module).values() if getattr(each, "model_type", None) == model_type)

    def read(theirs, config_dict, **kwargs):
        if fields.items() <= config_dict.items():
            return architecture.config_class.from_dict(config_dict, **kwargs)
        return theirs(config_dict, **kwargs)

    if not any(hasattr(config_class, name) for name in fields):
        _put_around(config_class, "from_dict", read)


def _put_around(cls: type, name: str, function: Callable) -> None:
    """Wraps a class method of transformers: `function` is called with the method and its arguments."""
    theirs = getattr(cls, name).__func__

    @functools.wraps(theirs)
    def method(cls, *args, **kwargs):
        return function(functools.partial(theirs, cls), *args, **kwargs)

    setattr(cls, name, classmethod(method))


def _load_directory(theirs: Callable, *args, **kwargs) -> Any:
    """`from_pretrained` of an Auto class, which would mistake a file of weights for the name of a repository."""
    from .weight_files import check_directory

    check_directory(args[0] if args else kwargs.get("pretrained_model_name_or_path"))
    return theirs(*args, **kwargs)


def _register_tokenizers(module: ModuleType) -> None:
    from subquad_tokenizers import auto

    _add(module.TOKENIZER_MAPPING, _by_configuration({name: auto.default_class(name) for name in REGISTRY}))
    if not isinstance(module.REGISTERED_TOKENIZER_CLASSES, LazyClasses):
        module.REGISTERED_TOKENIZER_CLASSES = LazyClasses(module.REGISTERED_TOKENIZER_CLASSES, auto.CLASSES)


def _register_models(module: ModuleType) -> None:
    for auto_class in {name for architecture in REGISTRY.values() for name in architecture.heads}:
        _put_around(getattr(module, auto_class), "from_pretrained", _load_directory)
        mapping = getattr(module, auto_class)._model_mapping
        with_head = {name: entry for name, entry in REGISTRY.items() if auto_class in entry.heads}
        _add(mapping, _by_configuration({name: a.path(a.heads[auto_class]) for name, a in with_head.items()}))
        # The table of names, which Trainer and the pipelines read.
        mapping._model_mapping.update({name: a.heads[auto_class] for name, a in with_head.items()})


def _register_processors(module: ModuleType) -> None:
    paths = {name: a.path(a.processor) for name, a in REGISTRY.items() if a.processor}
    _add(module.PROCESSOR_MAPPING, _by_configuration(paths))


def _register_pipelines(module: ModuleType) -> None:
    """Adds the pipeline `question-answering`, unless transformers has it."""
    from transformers.models.auto.modeling_auto import AutoModelForQuestionAnswering

    task, tasks = "question-answering", module.PIPELINE_REGISTRY.supported_tasks
    if task not in tasks:
        # `register_pipeline` would mark the class as the code of a repository: saving would copy it next to the model,
        # and loading would need `trust_remote_code`.
        entry = {"pt": (AutoModelForQuestionAnswering,), "default": {}, "type": "text"}
        tasks[task] = LazyClasses(entry, {"impl": "subquad.tools.question_answering.QuestionAnsweringPipeline"})
        # Newer versions refuse the names of removed tasks before they look them up.
        getattr(module, "REMOVED_TASKS", {}).pop(task, None)


def _register_adapters(module: ModuleType) -> None:
    from ..training.adapters import register

    register()


def _register_prompts(module: ModuleType) -> None:
    from ..training.adapters import register_prompts

    register_prompts(module)


def _register_state_tuning(module: ModuleType) -> None:
    importlib.import_module("subquad.training.state_tuning")  # registers itself, even if this module imported PEFT


def _register_gguf(module: ModuleType) -> None:
    """Makes transformers' error explain how GGUF files of our models are loaded."""

    def refuse(*args) -> dict:
        raise ValueError(GGUF.format(file="FILE.gguf"))

    for model_type in REGISTRY:
        module.GGUF_CONFIG_ARCHS.setdefault(model_type, refuse)


def _register_quantisers(module: ModuleType) -> None:
    classes = {
        "AUTO_QUANTIZATION_CONFIG_MAPPING": {name: f"{kind.capitalize()}Config" for kind, name in METHODS.items()},
        "AUTO_QUANTIZER_MAPPING": dict.fromkeys(METHODS.values(), "IntegerQuantizer"),
    }
    for table, ours in classes.items():
        if not isinstance(getattr(module, table), LazyClasses):
            paths = {name: f"subquad.quantization.quantized.{kind}" for name, kind in ours.items()}
            setattr(module, table, LazyClasses(getattr(module, table), paths))


def _register_decoding_steps(module: ModuleType) -> None:
    def make_cpu_step(*args) -> Any:
        from ..decoding.cpu import make

        return make(REGISTRY.values(), *args)

    def make_cuda_step(*args) -> Any:
        from ..decoding.cuda_graph import make

        return make(REGISTRY.values(), *args)

    module.MAKERS |= {"cpu": make_cpu_step, "cuda": make_cuda_step}


def _register_names(module: ModuleType, architecture: Architecture) -> None:
    importlib.import_module(f"{architecture.package}.{architecture.other_names}")


_AUTO = "transformers.models.auto."
# Module of transformers, PEFT or this package to the registrations to run each time it is imported.
_TABLES: dict[str, Callable[[ModuleType], None]] = {
    f"{_AUTO}configuration_auto": _register_configurations,
    f"{_AUTO}tokenization_auto": _register_tokenizers,
    f"{_AUTO}modeling_auto": _register_models,
    f"{_AUTO}processing_auto": _register_processors,
    "transformers.integrations.gguf.gguf_config_mapping": _register_gguf,
    "transformers.quantizers.auto": _register_quantisers,
    "transformers.pipelines": _register_pipelines,
    "peft.utils.constants": _register_adapters,
    "peft.peft_model": _register_prompts,
    "peft": _register_state_tuning,
    "subquad.decoding.step": _register_decoding_steps,
    **{
        f"{architecture.package}.modeling_{architecture.folder}": functools.partial(
            _register_names, architecture=architecture
        )
        for architecture in REGISTRY.values()
        if architecture.other_names
    },
    **{
        f"transformers.models.{name}.configuration_{name}": functools.partial(
            _share_type, model_type=name, fields=fields, architecture=architecture
        )
        for architecture in REGISTRY.values()
        for name, fields in architecture.other_types.items()
        if fields
    },
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Registers with a module once it has been executed, so that an import that fails can be repeated."""

    def __init__(self):
        self.searching = set()

    def find_spec(self, name, path, target=None):
        if name not in _TABLES or name in self.searching:
            return None
        self.searching.add(name)
        try:
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self.searching.discard(name)
        if spec is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            if module.__name__ == name:  # a loader may have several modules
                _TABLES[name](module)

        spec.loader.exec_module = exec_module
        return spec


def start() -> None:
    """Registers with modules that are already imported, and with the others as soon as they are."""
    if not any(type(finder) is _AfterImport for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    for name, register in _TABLES.items():
        if sys.modules.get(name) is not None:  # None: an import that is blocked
            register(importlib.import_module(name))  # waits, if another thread is importing it
