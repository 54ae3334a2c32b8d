"""Pictures of the pages on how to use the library."""

from drawing import Picture


def dispatch_combine() -> Picture:
    p = Picture(760, 300, "A token goes to the ranks of its experts; one sum comes back from each of them")
    p.box(20, 40, 130, 220, "rank 0", "rank", top=True)
    for number, name in enumerate("abc"):
        p.box(45, 85 + 55 * number, 80, 36, f"token {name}", "row")
    p.text(255, 24, "dispatch", anchor="middle", bold=True)
    p.text(545, 24, "combine", anchor="middle", bold=True)
    for rank, tokens in enumerate(("a  b", "a  c")):
        y = 50 + 110 * rank
        p.box(310, y, 170, 96, f"rank {rank}: experts {2 * rank}, {2 * rank + 1}", "rank", top=True)
        p.box(330, y + 34, 130, 24, f"rows {tokens}", "row")
        p.box(330, y + 64, 130, 24, "your experts", "work")
        p.arrow(152, 120 + 60 * rank, 306, y + 46)
        p.arrow(482, y + 60, 606, 120 + 60 * rank)
    p.box(610, 40, 130, 220, "rank 0", "rank", top=True)
    for number, name in enumerate("abc"):
        p.box(630, 85 + 55 * number, 90, 36, f"sum of {name}", "row")
    p.text(
        380, 288, "a chose experts on both ranks: its row crosses once to each, and one sum comes back from each", size=12, anchor="middle"
    )
    return p


def layouts() -> Picture:
    p = Picture(760, 270, "The rows that one rank receives, in the two layouts")
    p.text(190, 26, 'layout="rank"', anchor="middle", bold=True)
    p.text(570, 26, 'layout="expert", expert_alignment=4', anchor="middle", bold=True)
    for number, (name, experts) in enumerate((("a", "expert 0"), ("b", "experts 0 and 1"), ("c", "expert 1"))):
        p.box(60, 45 + 40 * number, 90, 32, name, "row")
        p.text(165, 66 + 40 * number, experts)
    p.text(60, 190, "one row for each token that")
    p.text(60, 208, "has an expert here")
    for group, names in enumerate((("a", "b", "0", "0"), ("b", "c", "0", "0"))):
        for number, name in enumerate(names):
            p.box(440, 45 + 26 * (4 * group + number), 90, 23, name, "memory" if name == "0" else "row")
        p.text(545, 100 + 104 * group, f"expert {group}: 2 rows and padding", size=13)
    return p


def steps() -> Picture:
    p = Picture(760, 292, "Six tokens of two ranks: the rows that their experts get, and the sums that come back")
    for x, title in ((85, "tokens"), (330, "rows of the experts"), (655, "sums")):
        p.text(x, 22, title, anchor="middle", bold=True)
    rows = ((("expert 0", ("1", "12", "13")), ("expert 1", ("1", "2"))), (("expert 2", ("2", "11", "13")), ("expert 3", ("3", "11", "12"))))
    for rank, (tokens, sums) in enumerate(((("1", "2", "3"), ("1.5", "5", "6")), (("11", "12", "13"), ("38.5", "30", "26")))):
        y = 36 + 126 * rank
        for x, values in ((20, tokens), (590, sums)):
            p.box(x, y, 130, 112, f"rank {rank}", "rank", top=True)
            for number, value in enumerate(values):
                p.box(x + 30, y + 28 + 27 * number, 70, 23, value, "row")
        p.box(220, y, 300, 112, f"rank {rank}", "rank", top=True)
        for number, (name, values) in enumerate(rows[rank]):
            p.text(232, y + 50 + 40 * number, name)
            for column, value in enumerate(values):
                p.box(310 + 66 * column, y + 32 + 40 * number, 58, 26, value, "row")
    for start, end, text in ((152, 216, "dispatch"), (522, 586, "combine")):
        p.arrow(start, 92, end, 92)
        p.arrow(start, 218, end, 218)
        p.arrow(start, 120, end, 190, dashed=True)
        p.arrow(start, 190, end, 120, dashed=True)
        p.text((start + end) / 2, 286, text, size=12, anchor="middle")
    return p


def hooks() -> Picture:
    p = Picture(760, 210, "A call in two halves: no SM is held while the rows travel")
    for y, name in ((50, "GPU"), (110, "link")):
        p.text(20, y + 24, name, bold=True)
    p.box(90, 50, 120, 38, "send", "work")
    p.box(214, 50, 260, 38, "your kernels: experts, attention", "plain")
    p.box(478, 50, 120, 38, "receive", "work")
    p.box(602, 50, 130, 38, "use recv_x", "plain")
    p.box(130, 110, 310, 38, "rows on their way", "row")
    p.text(90, 34, "dispatch(return_hook=True)", size=13)
    p.text(478, 34, "out.hook()", size=13)
    p.text(90, 185, "The half that sends returns at once. The hook enqueues the half that receives.")
    return p


def two_hops() -> Picture:
    p = Picture(760, 290, "Two hops: one row crosses the network for each node, then NVLink carries it to each rank")
    for node in range(2):
        x = 20 + 440 * node
        p.box(x, 30, 280, 200, f"node {node}", "memory", top=True)
        for index in range(2):
            for column in range(2):
                p.box(
                    x + 20 + 130 * column,
                    65 + 80 * index,
                    110,
                    60,
                    f"rank {2 * index + (column if node else 1 - column)}\nof node {node}",
                    "rank",
                )
    p.arrow(282, 95, 476, 95, "network: one row")
    p.text(380, 116, "per (token, node)", size=13, anchor="middle")
    p.arrow(592, 90, 606, 90)
    p.arrow(535, 127, 535, 143)
    p.arrow(592, 112, 625, 143)
    p.text(
        380,
        258,
        "The row goes to the rank of the same index, which forwards it over NVLink to the ranks with an expert.",
        size=13,
        anchor="middle",
    )
    p.text(380, 278, "combine goes the same way back: the ranks of a node are added up before the sum crosses.", size=13, anchor="middle")
    return p


def _layer(title: str, *lines: str) -> Picture:
    """The parts of a MoE layer of a framework. What is ours is green; `lines`: one above, two below."""
    p = Picture(760, 190, title)
    for number, (text, kind) in enumerate(
        (("router", "plain"), ("gate", "work"), ("dispatch", "work"), ("experts", "plain"), ("combine", "work"), ("output", "plain"))
    ):
        p.box(15 + 124 * number, 60, 102, 56, text, kind)
        if number < 5:
            p.arrow(118 + 124 * number, 88, 137 + 124 * number, 88)
    for y, line in zip((35, 150, 170), lines, strict=True):
        p.text(15, y, line, size=13)
    return p


def megatron() -> Picture:
    return _layer(
        "Where deepep_moe stands in a MoE layer of Megatron-Core",
        "MoELayer of Megatron-Core; green: what the flex dispatcher `deepep_moe` does",
        "The gate stands for Megatron-Core's routing where it can. Parameters, optimizer and",
        "checkpoints are Megatron-Core's own.",
    )


def autoep() -> Picture:
    return _layer(
        "Where deepep_moe stands in a MoE layer of AutoEP",
        "AutoEPMoELayer of DeepSpeed; green: what deepep_moe does in it",
        "The gate stands for AutoEP's choice where it can; dispatch and combine stand for its two",
        "all-to-alls. Parameters, optimizer and checkpoints are AutoEP's own.",
    )


def queues() -> Picture:
    p = Picture(760, 250, "A dispatch in the model: chunks pass one queue after the other, and the slowest queue sets the time")
    # Of each stage: where its first chunk begins, how long it takes, and how far apart chunks are.
    stages = (("SMs pack", 120, 60, 60), ("NIC sends", 182, 130, 130), ("NIC receives", 202, 130, 130), ("SMs forward", 334, 60, 130))
    for row, (name, first, length, apart) in enumerate((*stages, ("NVLink", 396, 72, 130))):
        p.text(15, 36 + 38 * row, name, bold=True)
        for chunk in range(3):
            kind = "wait" if "NIC" in name else "work"
            p.box(first + apart * chunk, 16 + 38 * row, length - 3, 30, f"chunk {chunk}" if length > 70 else f"{chunk}", kind)
    p.text(15, 234, "A stage takes one chunk after the other. Here the NICs are never idle, so they bound the call.", size=13)
    return p


def slots_and_rows() -> Picture:
    p = Picture(760, 250, "Padded slots of DeepSpeed, and packed rows")
    p.text(20, 28, "DeepSpeed: slots up to a capacity, for each expert and rank", bold=True)
    for expert, filled in enumerate((3, 1, 4, 0)):
        for slot in range(4):
            p.box(20 + 180 * expert + 40 * slot, 44, 36, 34, "", "row" if slot < filled else "memory")
        p.text(20 + 180 * expert, 98, f"expert {expert}", size=12)
    p.text(20, 140, "deepep_moe: the rows that there are, in the order of the experts", bold=True)
    x = 20
    for expert, filled in enumerate((3, 1, 4)):
        p.text(x, 210, f"expert {expert}", size=12)
        for _ in range(filled):
            p.box(x, 156, 36, 34, "", "row")
            x += 40
        x += 26
    p.text(20, 238, "Ranks may hold different numbers of tokens, so no rank waits for another one's padding.", size=13)
    return p


def backends() -> Picture:
    p = Picture(760, 300, "How `auto` chooses a backend")
    p.box(250, 14, 260, 44, "Does every rank see a GPU,\nin a group with NCCL?", "plain")
    p.arrow(300, 60, 180, 98)
    p.text(215, 76, "yes", size=13, anchor="end")
    p.arrow(460, 60, 580, 98)
    p.text(545, 76, "no", size=13)
    p.box(60, 100, 240, 44, "Are all ranks on one host?", "plain")
    p.box(480, 100, 240, 44, "Are all ranks on one host?", "plain")
    for x, name in ((20, "nvlink"), (200, "nvshmem"), (500, "shm")):
        p.box(x, 190, 130, 40, name, "work")
    p.arrow(140, 146, 90, 186, "")
    p.text(92, 168, "yes", size=13, anchor="end")
    p.arrow(220, 146, 262, 186)
    p.text(254, 166, "no", size=13)
    p.arrow(580, 146, 566, 186)
    p.text(560, 168, "yes", size=13, anchor="end")
    p.box(20, 256, 720, 34, "collective", "wait")
    for x in (85, 265, 565):
        p.arrow(x, 232, x, 252, dashed=True)
    p.arrow(690, 146, 690, 252, "no")
    p.text(300, 246, "dashed: it cannot serve", size=12)
    return p


def tuner() -> Picture:
    p = Picture(760, 190, "The tuner: search, compare by turns, keep what is certainly faster")
    steps = (
        ("search:\none setting\nat a time", "work"),
        ("drop the\nslower half,\nmeasure more", "work"),
        ("default and\nbest, by turns,\nin pairs", "work"),
        ("gain certain\nand at least\n0.5%?", "plain"),
        ("profile", "row"),
    )
    for number, (text, kind) in enumerate(steps):
        p.box(15 + 150 * number, 30, 122, 70, text, kind)
        if number < 4:
            p.arrow(138 + 150 * number, 65, 162 + 150 * number, 65)
    p.text(676, 120, "Buffer loads it", size=13, anchor="middle")
    p.arrow(526, 102, 526, 140)
    p.text(526, 160, "no: nothing is written", size=13, anchor="middle")
    return p


def places() -> Picture:
    p = Picture(760, 220, "A rank belongs on the cores, the memory and the NIC beside its GPU")
    for node in range(2):
        x = 20 + 370 * node
        p.box(x, 20, 350, 170, f"NUMA node {node}", "memory", top=True)
        for gpu in range(2):
            number = 2 * node + gpu
            p.box(x + 20 + 165 * gpu, 52, 145, 34, f"cores of rank {number}", "rank")
            p.box(x + 20 + 165 * gpu, 96, 145, 34, f"GPU {number}", "work")
            p.box(x + 20 + 165 * gpu, 140, 145, 34, f"NIC {number}", "row")
    p.text(380, 210, "`--bind` keeps each rank in its column", size=13, anchor="middle")
    return p


def doctor() -> Picture:
    p = Picture(760, 150, "From a symptom to what to do")
    for number, text in enumerate(
        ("something\nis wrong", "the message:\ntroubleshoot", "the machine:\ndoctor", "the exchange:\ndoctor --test", "report it")
    ):
        p.box(15 + 150 * number, 40, 124, 56, text, "work" if number in (1, 2, 3) else "plain")
        if number < 4:
            p.arrow(140 + 150 * number, 68, 162 + 150 * number, 68)
    p.text(15, 130, "Each step either names the fix or hands on to the next one.", size=13)
    return p


PICTURES = {
    "dispatch_combine": dispatch_combine, "steps": steps, "layouts": layouts, "hooks": hooks, "two_hops": two_hops, "megatron": megatron,
    "autoep": autoep, "queues": queues, "slots_and_rows": slots_and_rows, "backends": backends, "tuner": tuner, "places": places,
    "doctor": doctor,
}  # fmt: skip
