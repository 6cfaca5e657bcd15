"""`moeffn tune`: measure the Triton tiles of a layer on this GPU and write those that are faster than the shipped."""

from __future__ import annotations

import typer

from .. import checks

DTYPES = ("bfloat16", "float16", "float32")


def register(app: typer.Typer) -> None:
    @app.command()
    def tune(out: str = typer.Argument(metavar="FILE", help="The JSON file to write; MOEFFN_TILES=FILE then uses it."),
             d_model: int = typer.Option(2048, help="Width of the model."),
             d_expert: int = typer.Option(768, help="Width of an expert."),
             experts: int = typer.Option(128, help="Experts."),
             top_k: int = typer.Option(8, help="Experts per token."),
             tokens: str = typer.Option("128,1024,32768", help="Token counts, separated by commas: one for each "
                                                               "bucket of rows per expert (to 16, to 96, more)."),
             dtype: str = typer.Option("bfloat16", help=", ".join(DTYPES) + ".")) -> None:
        """Measure the tiles of the triton backend on this GPU; write those that beat the shipped ones.

        The file holds for this device, these widths and this version of Triton; elsewhere it is not used.
        """
        import torch

        from ..backends import resolve

        checks.one_of("--dtype", dtype, DTYPES)
        try:
            counts = [int(t) for t in tokens.split(",")]
        except ValueError:
            raise checks.bad("--tokens", "numbers separated by commas", repr(tokens)) from None
        if not torch.cuda.is_available():
            raise checks.bad("moeffn tune", "a machine with a CUDA or ROCm GPU", "no such device: nothing was measured")
        device, kind = torch.device("cuda", torch.cuda.current_device()), getattr(torch, dtype)
        resolve("triton", device, kind)
        from ..backends import tuning  # imports triton: only where the backend is there

        found = tuning.tune(counts, d_model=d_model, d_expert=d_expert, num_experts=experts, top_k=top_k, dtype=kind,
                            device=device, say=typer.echo)
        tuning.save(out, tuning.device_name(), found)
        typer.echo(f"{len(found)} tiles faster than the shipped ones: {out}")
