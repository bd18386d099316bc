"""Does it fit on the card? Options and the memory of every phase, from the configuration of a model alone.

    python plan.py --model Qwen/Qwen3-4B --gpu 24
    python plan.py --model Qwen/Qwen3.5-4B --gpu 48 --teacher Qwen/Qwen3.5-27B --max-context 8192
    python grpo.py --preset 24gb --model Qwen/Qwen3-4B ...        # passes the options that such a plan ends with

How it is counted, and against what that was measured: rl/memory.py; what fits: rl/presets.py. While the teacher is in memory, no other
model is, but for --on-policy step of distill.py: there it stays beside the policy, and its weights are to be added to the other phases.
"""
from envs import BadInput
from rl.presets import CONTEXT, GIB, KNOWN, SHARE, as_words, config_of, fit
from rl.runs import Parser, cli


def with_teacher(teacher, bits, top_k):
    """The phases of distill.py, for `further` of `fit`: what the teacher makes, and the student's gradient from what is stored of it."""
    import torch

    from funnel.teacher import numerator, targets
    from rl.learner import add_gradient, sampled_states
    from rl.memory import builder, rows_on_meta, weight_bytes, working

    @torch.no_grad()
    def teach(model, tokens, length):
        def work():
            hidden_ND = sampled_states(model, *rows_on_meta(tokens, length))[0]
            targets(model, hidden_ND, torch.zeros(len(hidden_ND), top_k // 2, dtype=torch.long, device="meta"), top_k, None, 1.0)

        return working(model, work)

    def distil(model, tokens, length):
        def work():
            hidden_ND = sampled_states(model, *rows_on_meta(tokens, length))[0]
            width = top_k + 1 if top_k else len(model.get_output_embeddings().weight)
            taught = (torch.ones(len(hidden_ND), device="meta"), torch.zeros(len(hidden_ND), top_k, dtype=torch.int, device="meta"),
                      torch.empty(len(hidden_ND), width, device="meta"))
            add_gradient(numerator(model, hidden_ND, *taught, None, 1.0), [p for p in model.parameters() if p.requires_grad])

        return working(model, work)

    def further(found):
        build = builder(config_of(teacher))
        return {"teacher, alone": (*weight_bytes(build(), bits), teach, build),
                "distil": (found.fixed, found.unpacked, distil, found.build)}

    return further


def memory_table(found) -> str:
    lines = [f"{found.name}, context of {found.context} tokens, on {found.gpu} GiB: {found.room / GIB:.1f} to use "
             f"({CONTEXT:.0f} for the card itself, {SHARE:.0%} for fragmentation)", "",
             "GiB              weights, adapter, optimizer   cache   working    peak"]
    for phase, (fixed, cache, rest) in found.phases.items():
        total = fixed + cache + rest
        lines.append(f"{phase:<15}  {fixed / GIB:>27.1f}  {cache / GIB:>6.1f}  {rest / GIB:>8.1f}  {total / GIB:>6.1f}"
                     + ("" if total <= found.room else "   does not fit"))
    return "\n".join([*lines, "", "pass " + as_words(found)])


def main(argv=None):
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", required=True, help=f"a folder, a name on the hub, or without a network: {', '.join(KNOWN)}")
    parser.add_argument("--gpu", type=float, required=True, help="memory of the card in GiB")
    parser.add_argument("--bits", type=int, choices=(4, 16, 32), help="of the weights (default: 16 if that fits, else 4)")
    parser.add_argument("--lora-rank", type=int, default=16, help="of the adapter (default: %(default)s)")
    parser.add_argument("--max-context", type=int, default=4096, help="tokens of an episode (default: %(default)s)")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "paged_adamw_8bit"),
                        help="(default: %(default)s)")
    parser.add_argument("--teacher", default="", help="plan distill.py with this teacher; while it is in memory, no other model is")
    parser.add_argument("--teacher-bits", type=int, default=4, choices=(4, 16), help="of its weights (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=4096, help="as in distill.py")
    args = parser.parse_args(argv)
    if args.gpu <= CONTEXT or args.max_context < 16 or args.lora_rank < 1 or args.top_k < 0:
        raise BadInput(f"--gpu must be above {CONTEXT:.0f}, --max-context at least 16, --lora-rank at least 1, --top-k 0 or above")
    further = {"further": with_teacher(args.teacher, args.teacher_bits, args.top_k)} if args.teacher else {}
    print(memory_table(fit(args.model, args.gpu, bits=args.bits, rank=args.lora_rank, max_context=args.max_context,
                           optimizer=args.optimizer, **further)))


if __name__ == "__main__":
    cli(main)
