"""DeepEP's `Config`: how many SMs a call may use, and sizes of chunks, which deepep_moe chooses by itself."""

from dataclasses import asdict, dataclass

from deepep_moe.arguments import as_int

_MAX_NVL_RANKS = 8


@dataclass(frozen=True)
class Config:
    """Settings of a call. `num_sms` counts; the chunk sizes are kept for callers that read them, and change nothing.

    The size hints are numbers of bytes that grow with their arguments. Callers pass them to `Buffer`, whose own memory does not depend on
    them: it follows the sizes of its calls.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            object.__setattr__(self, name, as_int(name, value, least=0))

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return bytes for rows of `hidden_bytes` among `num_ranks` ranks."""
        num_ranks = as_int("num_ranks", num_ranks)
        return self._bytes(hidden_bytes, min(num_ranks, _MAX_NVL_RANKS), self.num_max_nvl_chunked_recv_tokens)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return bytes for rows of `hidden_bytes` among `num_ranks` ranks; 0 for one node, at most 8 ranks."""
        num_ranks = as_int("num_ranks", num_ranks)
        if num_ranks <= _MAX_NVL_RANKS:
            return 0
        return self._bytes(hidden_bytes, -(-num_ranks // _MAX_NVL_RANKS), self.num_max_rdma_chunked_recv_tokens)

    def _bytes(self, hidden_bytes: int, num_peers: int, num_tokens: int) -> int:
        return max(1, self.num_sms // 2) * num_peers * num_tokens * as_int("hidden_bytes", hidden_bytes)
