import sys, torch, time, statistics, json
import torch.distributed as dist
from deepep_moe import Buffer
from deepep_moe.testing import run_ranks
def bench(rank, n, T, H, E, K):
    torch.cuda.set_device(rank)
    g=torch.Generator(device="cuda").manual_seed(rank)
    x=torch.randn(T,H,device="cuda",generator=g).bfloat16(); idx=torch.rand(T,E,device="cuda",generator=g).topk(K).indices; w=torch.rand(T,K,device="cuda",generator=g)
    b=Buffer(None,T,H,E,K,backend="nvlink",timeout_s=20)
    import deepep_moe.backends.nvlink as nv
    res={}
    for blocks in (8,16,24,32,48):
        nv._NUM_SEND_BLOCKS=blocks
        for layout in ("expert","rank"):
            def d(): return b.dispatch(x,idx,w,layout=layout,expert_alignment=128)
            out=d(); rw=out.recv_topk_weights if layout=="expert" else None
            def c(): return b.combine(out.recv_x,out.handle,rw)
            def dc(): return b.dispatch(x,handle=out.handle)
            for name,f in (("dispatch",d),("cached",dc),("combine",c)):
                ts=[]
                for i in range(25):
                    torch.cuda.synchronize(); dist.barrier(); 
                    e0=torch.cuda.Event(enable_timing=True); e1=torch.cuda.Event(enable_timing=True)
                    e0.record(); r=f(); e1.record(); torch.cuda.synchronize(); ts.append(e0.elapsed_time(e1)*1e3)
                t=torch.tensor(ts[5:]); dist.all_reduce(t,op=dist.ReduceOp.MAX); res[(blocks,layout,name)]=t.median().item()
    b.destroy()
    return res
if __name__=="__main__":
    n=int(sys.argv[1])
    r=run_ranks(bench,n,4096,7168,256,8,timeout_s=200)[0]
    for k,v in r.items(): print(n,k,round(v,1))
