"""INTERIM"""
from __future__ import annotations
import time, shutil
from pathlib import Path
import torch
class Keeper:
    def __init__(self, folder, recipe):
        self.folder, self.recipe = Path(folder), recipe
        self.saved_step=None; self.saved_at_s=None; self.save_s=None; self.is_saving=False
        self._last=time.monotonic()
    def __enter__(self): return self
    def __exit__(self,*a): pass
    def _all(self): return sorted(self.folder.glob("step-*")) if self.folder.exists() else []
    def newest_folder(self):
        a=self._all(); return a[-1] if a else None
    def load(self, trained, say):
        f=self.newest_folder()
        self._last=time.monotonic()
        if f is None: return 0
        d=torch.load(f/"x.pt", weights_only=True)
        trained.model.load_state_dict(d["m"]); trained.optimizer.load_state_dict(d["o"])
        self.saved_step=int(f.name[5:]); return self.saved_step
    def is_due(self, step):
        if self.recipe.every and step % self.recipe.every==0: return True
        return self.recipe.minutes is not None and time.monotonic()-self._last>60*self.recipe.minutes
    def save(self, trained, step):
        t=time.monotonic()
        f=self.folder/f".p"; shutil.rmtree(f, ignore_errors=True); f.mkdir(parents=True)
        trained.session.settle()
        torch.save({"m":trained.model.state_dict(),"o":trained.optimizer.state_dict()}, f/"x.pt")
        from safetensors.torch import save_file
        import copy
        sd={k:v.clone() for k,v in trained.model.state_dict().items()}
        save_file(sd, f/"model.safetensors", metadata={"format":"pt"})
        f.rename(self.folder/f"step-{step:08d}")
        self.save_s=time.monotonic()-t; self.saved_step=step; self.saved_at_s=self._last=time.monotonic()
    def wait(self): pass
