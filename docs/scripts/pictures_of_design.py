"""Pictures of the design pages: one mechanism each. The pages have the details."""

from drawing import Picture


def layers() -> Picture:
    p = Picture(760, 300, "The rooms, from a layer down to the kernels")
    rows = (
        ("your layer, integrations, nn", "plain"),
        ("Buffer, LowLatencyBuffer: arguments, events", "rank"),
        ("calls: check, plan, move, refuse", "rank"),
        ("backends: shm, nvlink, nvshmem, collective", "rank"),
    )
    for number, (text, kind) in enumerate(rows):
        p.box(180, 14 + 46 * number, 400, 34, text, kind)
        p.arrow(380, 48 + 46 * number, 380, 60 + 46 * number)
    p.text(20, 206, "addresses, shapes, strides; no PyTorch below", size=13)
    p.box(180, 218, 400, 30, "bindings, runtime: peers' memory, host sequence", "work")
    p.arrow(380, 248, 380, 258)
    p.box(180, 258, 400, 30, "kernels: cpu, cuda", "work")
    return p


def sums() -> Picture:
    p = Picture(760, 220, "The sum of combine has two steps, and one rounding in each")
    for rank in range(2):
        y = 30 + 90 * rank
        p.box(20, y, 330, 66, f"rank {rank}: the token's rows, weighted,\nadded up in top-k order, in fp32,\nrounded once", "rank")
        p.arrow(352, y + 33, 506, 84 + 30 * rank)
        p.text(440, y + (20 if rank == 0 else 66), f"s_{rank}", size=13)
    p.box(510, 60, 230, 80, "the token's rank:\ns_0 + s_1 + bias in fp32,\nrounded once", "work")
    p.text(20, 208, "The order is fixed, so every backend and every run has the same bits.", size=13)
    return p


def rings() -> Picture:
    p = Picture(760, 230, "A ring in shared memory: one rank fills it, its owner drains it")
    p.box(20, 60, 130, 80, "rank 0\nx", "rank")
    p.box(240, 30, 500, 150, "segment of rank 1, mapped by rank 0", "memory", top=True)
    for slot in range(6):
        p.box(260 + 46 * slot, 80, 42, 40, "", "row" if slot in (1, 2, 3) else "plain")
    p.arrow(152, 100, 256, 100, "fills")
    p.arrow(540, 100, 606, 100, "drains")
    p.box(610, 74, 115, 52, "recv_x\nof rank 1", "rank")
    p.text(260, 150, "slots, used over and over", size=13)
    p.text(20, 212, "A row goes from the slot to its final places while it is still in the cache.", size=13)
    return p


def nvlink_roles() -> Picture:
    p = Picture(760, 260, "A dispatch between two GPUs: blocks play roles, and flags release chunks of 4 rows")
    p.box(20, 20, 250, 190, "rank 0", "rank", top=True)
    p.box(40, 56, 210, 32, "plan: counts, places", "work")
    p.box(40, 104, 210, 32, "metadata senders", "work")
    p.box(40, 152, 210, 32, "senders: rows, then a flag", "work")
    p.box(480, 20, 260, 190, "rank 1", "rank", top=True)
    p.box(500, 56, 220, 32, "counts of all ranks", "memory")
    p.box(500, 104, 220, 32, "top-k entries", "memory")
    p.box(500, 152, 220, 46, "inbox -> receivers\n-> rows by expert", "row")
    for y, text in ((72, "counts"), (120, "top-k entries"), (170, "chunks of 4 rows")):
        p.arrow(252, y, 496, y, text)
    p.text(20, 240, "The receivers expand a chunk into its final rows while later chunks still fly.", size=13)
    return p


def host() -> Picture:
    p = Picture(760, 240, "The host of a dispatch waits for one number, or with a guess for none before it launches")
    for x, title in ((20, "no guess"), (400, "with a guess of the rows")):
        p.text(x, 28, title, bold=True)
        p.text(x, 74, "host", size=13)
        p.text(x, 140, "GPU", size=13)
    for x, w, text, kind in ((60, 60, "plan", "work"), (122, 110, "waits", "wait"), (234, 120, "allocate,\nlaunch", "work")):
        p.box(x, 48, w, 44, text, kind)
    for x, w, text, kind in ((100, 60, "plan", "work"), (162, 110, "send", "row"), (300, 70, "receive", "row")):
        p.box(x, 114, w, 44, text, kind)
    for x, w, text, kind in ((440, 140, "allocate, launch", "work"), (582, 90, "waits", "wait")):
        p.box(x, 48, w, 44, text, kind)
    for x, w, text, kind in ((480, 60, "plan", "work"), (542, 190, "send and receive", "row")):
        p.box(x, 114, w, 44, text, kind)
    p.text(20, 200, "A guess exists where the last two dispatches received about as many rows. With num_recv_rows", size=13)
    p.text(20, 220, "or a handle the host waits for nothing.", size=13)
    return p


def turns() -> Picture:
    p = Picture(760, 200, "Call n uses turn n % 4 of the workspace, and its flags hold n")
    for call in range(1, 7):
        x = 90 + 110 * (call - 1)
        p.box(x, 40, 92, 36, f"call {call}", "work")
        p.box(x, 110, 92, 36, f"turn {call % 4}", "memory")
        p.arrow(x + 46, 78, x + 46, 106)
    p.text(20, 62, "calls", size=13)
    p.text(20, 132, "memory", size=13)
    p.text(20, 182, "A rank in call n has received call n - 2, so all have read call n - 4: its turn may be written again.", size=13)
    return p


def line() -> Picture:
    p = Picture(760, 170, "A line of 128 bytes brings its own flag")
    for part in range(7):
        p.box(20 + 84 * part, 40, 80, 44, "16 bytes", "row")
    p.box(608, 40, 66, 44, "scales", "memory")
    p.box(678, 40, 66, 44, "flag", "wait")
    p.text(20, 28, "8 threads store it with one instruction, and load it the same way", size=13)
    p.text(20, 118, "A flag in another line would wait until the link has acknowledged the row.", size=13)
    p.text(20, 140, "Here whoever sees the flag has the row.", size=13)
    return p


def overlap() -> Picture:
    p = Picture(760, 220, "Two micro-batches by turns: one computes while the rows of the other travel")
    for y, name in ((40, "computes"), (100, "travels")):
        p.text(15, y + 25, name, size=13)
    work = (("experts 0", "work"), ("experts 1", "rank"), ("attention 0", "work"), ("attention 1", "rank"), ("experts 0", "work"))
    flight = (("dispatch 1", "rank"), ("combine 0", "work"), ("combine 1", "rank"), ("dispatch 0", "work"), ("dispatch 1", "rank"))
    for number in range(5):
        p.box(85 + 132 * number, 40, 126, 40, *work[number])
        p.box(85 + 132 * number, 100, 126, 40, *flight[number])
    p.text(85, 170, "green: micro-batch 0, blue: micro-batch 1", size=13)
    p.text(85, 194, "Each turn receives, computes and sends. So each batch has one call in flight at most.", size=13)
    return p


def chunks() -> Picture:
    p = Picture(760, 200, "Chunks of one layer, as a trial had them: the next one travels while the experts compute this one")
    for y, name in ((34, "travels"), (84, "computes"), (134, "returns")):
        p.text(15, y + 25, name, size=13)
    for chunk in range(3):
        x = 90 + 180 * chunk
        p.box(x, 34, 170, 38, f"dispatch {chunk}", "row")
        p.box(x + (180 if chunk < 2 else 120), 84, 110, 38, f"experts {chunk}", "work")
    p.box(360, 134, 120, 38, "combine 0", "row")
    p.box(500, 134, 120, 38, "combine 1", "row")
    p.box(632, 134, 118, 38, "combine 2", "row")
    return p


def gate() -> Picture:
    p = Picture(760, 210, "Group-limited gating of one token")
    best = {1, 4}
    for group in range(8):
        p.box(20 + 92 * group, 56, 84, 40, f"group {group}", "row" if group in (0, 1, 4, 6) else "memory")
        for expert in range(4):
            chosen = group in best and expert in (1, 2)
            p.box(22 + 92 * group + 20 * expert, 120, 18, 30, "", "work" if chosen else "plain")
    p.text(20, 36, "1. groups: the sum of a group's two best scores decides; the best topk_groups stay", size=13)
    p.text(20, 180, "2. top-k: the best experts of these groups. Ties go to the lower index, as in the reference.", size=13)
    return p


def fusion() -> Picture:
    p = Picture(760, 210, "Passes over all rows that a call absorbs")
    p.text(20, 30, "without fusion", bold=True)
    p.text(20, 120, "with fusion", bold=True)
    for number, text in enumerate(("experts' outputs", "cat: a pass", "combine", "sum: a pass")):
        p.box(20 + 185 * number, 44, 160, 36, text, "wait" if "pass" in text else "work")
        if number < 3:
            p.arrow(181 + 185 * number, 62, 203 + 185 * number, 62)
    p.box(20, 134, 160, 36, "experts' outputs", "work")
    p.arrow(181, 152, 386, 152)
    p.box(390, 134, 345, 36, "combine reads each tensor, sums rows", "work")
    p.text(20, 200, "A gradient of weights is made in the same way, while rows are placed.", size=13)
    return p


def autograd() -> Picture:
    p = Picture(760, 200, "The backward of each call is the other one")
    p.text(20, 58, "forward", size=13)
    p.text(20, 128, "backward", size=13)
    for number, (forward, backward) in enumerate(
        (("dispatch", "combine"), ("experts", "their backward"), ("combine", "dispatch by handle"))
    ):
        x = 110 + 215 * number
        p.box(x, 34, 180, 40, forward, "work" if number != 1 else "plain")
        p.box(x, 104, 180, 40, backward, "work" if number != 1 else "plain")
        if number < 2:
            p.arrow(x + 182, 54, x + 211, 54)
            p.arrow(x + 211, 124, x + 182, 124)
    p.text(20, 182, "Backward keeps the handle, and rows only where a weighted combine needs them.", size=13)
    return p


def failures() -> Picture:
    p = Picture(760, 250, "Three failures of rank 0, and what rank 1 learns")
    columns = (
        ("a wrong argument", "raises ValueError,\nrefuses the call", "EPPeerError at once,\nwith rank 0's reason"),
        ("it hangs", "nothing", "EPTimeoutError at the\ndeadline: rank, phase"),
        ("its process ends", "nothing", "EPTimeoutError soon after:\nthe process is gone"),
    )
    for number, (title, own, peer) in enumerate(columns):
        x = 70 + 230 * number
        p.text(x + 105, 28, title, anchor="middle", bold=True)
        p.box(x, 44, 212, 56, own, "wait")
        p.box(x, 136, 212, 56, peer, "rank")
        p.arrow(x + 105, 102, x + 105, 132, dashed=number > 0)
    p.text(8, 76, "rank 0", size=13)
    p.text(8, 168, "rank 1", size=13)
    p.text(70, 230, "No rank waits for ever, and every message names the culprit.", size=13)
    return p


def growing() -> Picture:
    p = Picture(760, 190, "A buffer grows when one rank has more tokens than it has room for")
    steps = (("rank 1 refuses:\nno room", "wait"), ("all meet in\nthe old buffer", "rank"), ("all agree on\na larger bound", "rank"),
             ("all make a new\nbuffer", "rank"), ("dispatch again", "work"))  # fmt: skip
    for number, (text, kind) in enumerate(steps):
        p.box(12 + 150 * number, 46, 130, 56, text, kind)
        if number < 4:
            p.arrow(143 + 150 * number, 74, 160 + 150 * number, 74)
    p.text(12, 140, "The old buffer stays while a backward may need it.", size=13)
    return p


def emulation() -> Picture:
    p = Picture(760, 220, "What stands for what on the emulated GPU")
    pairs = (("block", "thread"), ("thread of a block", "fiber"), ("peer's memory", "memory file"), ("stream", "thread with a queue"))
    for number, (real, emulated) in enumerate(pairs):
        x = 15 + 186 * number
        p.box(x, 50, 172, 40, real, "work")
        p.arrow(x + 86, 92, x + 86, 118)
        p.box(x, 120, 172, 40, emulated, "memory")
    p.text(15, 34, "CUDA", bold=True)
    p.text(15, 190, "the emulation: the same kernels, compiled for a CPU", bold=True)
    return p


def collective() -> Picture:
    p = Picture(760, 170, "The fallback: plain PyTorch over any process group")
    steps = (
        "1. entries:\nwhat each rank\nis about to do",
        "2. one all-to-all:\nrows with their\ntop-k entries",
        "3. place rows, or\nadd them up,\nin PyTorch",
    )
    for number, text in enumerate(steps):
        p.box(20 + 250 * number, 30, 210, 74, text, "work" if number else "rank")
        if number < 2:
            p.arrow(232 + 250 * number, 67, 266 + 250 * number, 67)
    p.text(20, 144, "A silent peer, or one in another call, is named in step 1.", size=13)
    return p


def fp8_passes() -> Picture:
    p = Picture(760, 300, "FP8 from gate to gradient: rows are quantized once at their source, and once more between the two products")
    p.text(20, 28, "forward", bold=True)
    for x, text, kind in ((20, "x, bf16\n-> e4m3", "rank"), (175, "dispatch\n1 byte a value", "row"), (330, "x w1'", "work")):
        p.box(x, 42, 125, 54, text, kind)
    p.box(485, 42, 110, 54, "SwiGLU\n-> e4m3", "work")
    p.box(625, 42, 115, 54, "a w2', then\ncombine, bf16", "row")
    p.text(20, 140, "backward", bold=True)
    for x, text, kind in ((20, "combine\nof bf16 dx", "row"), (175, "dh w1", "work"), (330, "SwiGLU back\n-> e4m3", "work")):
        p.box(x, 154, 125, 54, text, kind)
    p.box(485, 154, 110, 54, "dy w2", "work")
    p.box(625, 154, 115, 54, "dispatch\nof dy, e4m3", "row")
    for x1, x2 in ((147, 172), (302, 327), (457, 482), (597, 622)):
        p.arrow(x1, 69, x2, 69)
        p.arrow(x2, 181, x1, 181)
    p.text(20, 245, "Each e4m3 matrix is also rescaled and transposed: dh' x and dy' a are the gradients of w1 and w2.", size=13)
    p.text(20, 275, "Products add 128 terms in the tensor cores, and then in fp32 with both scales.", size=13)
    return p


def fp8_tiles() -> Picture:
    p = Picture(760, 250, "A block of the fp8 products: one thread loads, two warp groups multiply and add by turns")
    p.box(20, 40, 150, 60, "memory\nrows, matrices", "memory")
    p.box(250, 30, 190, 80, "4 stages in\nshared memory, each\n128 of the depth", "row")
    p.box(520, 20, 220, 46, "warps 0 to 3: 64 rows", "work")
    p.box(520, 76, 220, 46, "warps 4 to 7: 64 rows", "work")
    p.arrow(172, 70, 246, 70, "loads")
    p.arrow(442, 60, 516, 44)
    p.arrow(442, 80, 516, 98)
    for column in range(4):
        p.box(110 + 155 * column, 150, 75, 30, "multiply", "work" if column % 2 == 0 else "rank")
        p.box(187 + 155 * column, 150, 75, 30, "add", "memory")
    p.text(20, 170, "in turns:", size=13)
    p.text(20, 212, "While one group multiplies in the tensor cores, the other scales its sum of 128 products", size=13)
    p.text(20, 234, "and adds it in fp32. Offsets of groups are read on the device.", size=13)
    return p


PICTURES = {
    "layers": layers, "sums": sums, "rings": rings, "nvlink_roles": nvlink_roles, "host": host, "turns": turns, "line": line,
    "overlap": overlap, "chunks": chunks, "gate": gate, "fusion": fusion, "autograd": autograd, "failures": failures, "growing": growing,
    "emulation": emulation, "collective": collective, "fp8_passes": fp8_passes, "fp8_tiles": fp8_tiles,
}  # fmt: skip
