"""Import PyTorch, then the library of the folder that is given, and print a line of JSON after each, so that a crash leaves the first."""

import json
import sys


def main(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import torch

    torch_facts = {"version": torch.__version__, "cuda": torch.version.cuda, "nccl": None}
    if torch.version.cuda and torch.distributed.is_nccl_available():
        torch_facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    print(json.dumps({"torch": torch_facts}), flush=True)

    import deepep_moe
    from deepep_moe import nvshmem_module

    print(json.dumps({"features": deepep_moe.features()}), flush=True)
    loaded = nvshmem_module.load()
    module = sys.modules.get("deepep_moe._nvshmem")
    nvshmem = {"error": loaded if isinstance(loaded, str) else "", "built": [], "found": []}
    if module is not None:
        nvshmem |= {"built": [*module.version_built()], "found": [*module.version_found()]}
    print(json.dumps({"nvshmem": nvshmem}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
