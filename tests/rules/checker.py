"""Rules about names, checked on syntax trees: what a module may take from another one of ours.

Sources are a mapping from names of modules to their text, so that the rules can be tried on small ones.
A violation is ``module:line: what is wrong``.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

OURS = ("torchpact", "torchpact_recipes")

FOREIGN = {
    # the standard library's
    "_make": "named tuples",
    "_replace": "named tuples",
    "_fields": "named tuples",
    "_asdict": "named tuples",
    # huggingface_hub's
    "_hub_mixin_info": "ModelHubMixin",
    # torch's
    "_C": "torch",
    "_functorch": "torch.func",
    "_version": "counts changes of a tensor in place",
    "_foreach_copy_": "torch, for many tensors at once",
    "_foreach_sub": "torch, for many tensors at once",
    "_foreach_add_": "torch, for many tensors at once",
    "_foreach_addcmul_": "torch, for many tensors at once",
    "_inductor": "torch.compile's options",
    "_dynamo": "torch.compile's limits",
    "_reorder_linear_weight": "oneDNN's linear layers, probed",
    "_linear_pointwise": "oneDNN's linear layers, probed",
    "_orig_mod": "the module that torch.compile wraps",
    "_len_torch_dispatch_stack": "whether a TorchDispatchMode is on",
    "_cuda_getCurrentRawStream": "the stream for kernels of our own",
    "_cuda_getDevice": "the device for kernels of our own",
    "_cdata": "tells storages apart",
    "_validate_args": "torch.distributions",
    "_validate_sample": "torch.distributions",
    "_get_checked_instance": "torch.distributions",
    "_check_input_dim": "torch's batch norms",
    "_apply": "nn.Module, overridden",
    "_parameters": "nn.Module",
    "_buffers": "nn.Module",
    "_modules": "nn.Module",
    "_forward_hooks": "nn.Module",
    "_forward_pre_hooks": "nn.Module",
    "_forward_hooks_with_kwargs": "nn.Module",
    "_forward_hooks_always_called": "nn.Module",
    "_forward_pre_hooks_with_kwargs": "nn.Module",
    "_current_graph_task_id": "whether backward is running",
    # transformers'
    "_tied_weights_keys": "PreTrainedModel",
    "_attn_implementation": "a configuration of transformers",
}
"""Private names of others that we use, and whose they are."""

Sources = Mapping[str, str]


def read_sources(root: Path) -> dict[str, str]:
    """Return the text of every module below a folder, by the module's name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def is_ours(module: str) -> bool:
    return module.split(".")[0] in OURS


def private_names(sources: Sources, foreign: Mapping[str, str] = FOREIGN) -> list[str]:
    """Find private names that cross modules of ours, and private names of others that are not listed."""
    trees = {name: ast.parse(text) for name, text in sources.items()}
    defined = {name: set(_defined(tree)) for name, tree in trees.items()}
    found = []
    for module, tree in trees.items():
        for line, name in _imported(module, tree):
            found.append(f"{module}:{line}: {name} is imported")
        for line, name in _accessed(tree):
            if name in foreign or name in defined[module]:
                continue
            owners = [other for other, names in defined.items() if name in names]
            where = f"is of {', '.join(owners)}" if owners else "of another package is not listed"
            found.append(f"{module}:{line}: {name} {where}")
    return found


def _defined(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a module gives to something: variables, functions, attributes, fields."""
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            name = node.attr if of_self else None
        elif isinstance(node, ast.Call) and _called(node) == "register_buffer" and node.args:
            name = _text(node.args[0])
        if name is not None and is_private(name):
            yield name


def _imported(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:  # relative: of the same package
                source = ".".join([*module.split(".")[: -node.level], *source.split(".")]).rstrip(".")
            if not is_ours(source):
                continue
            for alias in node.names:
                # a private module serves its own package; a private name serves its module only
                if is_private(alias.name):
                    yield node.lineno, f"{source}.{alias.name}"
            if _is_private_elsewhere(source, module):
                yield node.lineno, source
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_ours(alias.name) and _is_private_elsewhere(alias.name, module):
                    yield node.lineno, alias.name


def _is_private_elsewhere(source: str, module: str) -> bool:
    """Whether a module is in a private one of a package that ``module`` is not in."""
    parts = source.split(".")
    return any(
        is_private(part) and not f"{module}.".startswith(".".join(parts[:index]) + ".")
        for index, part in enumerate(parts)
    )


def _accessed(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield private attributes that are read, written or named in ``getattr`` and the like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and _called(node) in ("getattr", "setattr", "hasattr", "delattr"):
            name = _text(node.args[1]) if len(node.args) > 1 else None
            if name is not None and is_private(name):
                yield node.lineno, name


def dynamic_imports(sources: Sources) -> list[str]:
    """Find modules of ours, or modules that cannot be told, that are imported by a function."""
    found = []
    for module, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or _called(node) not in ("import_module", "__import__"):
                continue
            name = _text(node.args[0]) if node.args else None
            if name is None:
                found.append(f"{module}:{node.lineno}: imports a module whose name is not in the source")
            elif is_ours(name) or name.startswith("."):
                found.append(f"{module}:{node.lineno}: imports {name} by a function")
    return found


def class_assignments(sources: Sources) -> list[str]:
    """Find objects that are given another class."""
    found = []
    for module, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            assigned = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if isinstance(node, ast.Call) and _called(node) in ("setattr", "__setattr__"):
                names = [_text(argument) for argument in node.args]
            else:
                names = [node.attr] if assigned and isinstance(node, ast.Attribute) else []
            if "__class__" in names:
                found.append(f"{module}:{getattr(node, 'lineno', 0)}: __class__ is assigned")
    return found


def private_imports(
    sources: Sources, package: str, rooms: list[str], allowed: Mapping[str, str]
) -> list[str]:
    """Find what modules of a package import that is not public.

    Args:
        sources: All modules.
        package: Whose imports are looked at; what it imports from itself is its own business.
        rooms: Modules whose ``__all__`` is public; a name in one is to be imported from there.
        allowed: Other modules that may be imported from, and why.

    """
    public = {room: exported(sources, room) for room in rooms if room in sources}
    found = []
    for module, text in sources.items():
        if module.split(".")[0] != package:
            continue
        for line, source, name in _imports_of_ours(ast.parse(text)):
            if source.split(".")[0] == package or (not name and source in (*rooms, *allowed)):
                continue
            homes = [room for room, names in public.items() if name in names]
            if source in homes or (not homes and (source in allowed or f"{source}.{name}" in allowed)):
                continue
            better = f"import it from {homes[0]}" if homes else "which is not public"
            found.append(f"{module}:{line}: imports {source} {name}: {better}")
    return found


def _imports_of_ours(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line, module and name of all imports of ours; no name where the module itself is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level and is_ours(node.module):
            for alias in node.names:
                yield node.lineno, node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_ours(alias.name):
                    yield node.lineno, alias.name, ""


def exported(sources: Sources, package: str) -> set[str]:
    """Return the names in ``__all__`` of a module."""
    for node in ast.parse(sources[package]).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            return set(ast.literal_eval(node.value))
    return set()


def _called(call: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
