"""The main job on real pictures: a Gram matrix too wide for one volunteer, and its leading eigenvectors.

Patches of 16 × 16 pixels are taken from the two photographs that scikit-learn ships. Their Gram matrix ``P @ P.T`` is
computed on volunteers, block by block, every block verified, and lies in Zarr. A few block power iterations on it give
the leading eigenvectors, and ``P.T @ v`` the patches that explain most of the pictures: eigen-patches, drawn next to
those that NumPy gets from a subsample.

    python examples/eigenpatches.py --size 16384 --output demo-output
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import dask.array as da
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_sample_images

import goblin_dask as goblin

SIDE, COMPONENTS, ITERATIONS = 16, 8, 6
SUBSAMPLE = 2048


def patches(size: int, seed: int = 0) -> np.ndarray:
    """Centred patches of the two photographs, shape (size, 768), float32."""
    rng = np.random.default_rng(seed)
    pictures = [picture.astype("float32") / 255 for picture in load_sample_images().images]
    rows = np.empty((size, SIDE * SIDE * 3), "float32")
    for i in range(size):
        picture = pictures[i % len(pictures)]
        y, x = (int(rng.integers(0, extent - SIDE + 1)) for extent in picture.shape[:2])
        rows[i] = picture[y : y + SIDE, x : x + SIDE].ravel()
    return rows - rows.mean(axis=0)


def leading_vectors(gram: da.Array, lab: goblin.Lab, seed: int = 0) -> np.ndarray:
    """Leading eigenvectors of a positive semi-definite matrix by block power iteration, shape (n, COMPONENTS)."""
    block = np.random.default_rng(seed).standard_normal((gram.shape[0], COMPONENTS)).astype("float32")
    for _ in range(ITERATIONS):
        image = lab.compute(gram @ da.from_array(np.linalg.qr(block)[0], chunks=(gram.chunks[1], COMPONENTS)))
        block = image
    q, _ = np.linalg.qr(block)
    # Rotate the basis of the subspace to its eigenvectors, the largest first.
    small = q.T @ lab.compute(gram @ da.from_array(q, chunks=(gram.chunks[1], COMPONENTS)))
    values, rotation = np.linalg.eigh((small + small.T) / 2)
    return q @ rotation[:, np.argsort(values)[::-1]]


def draw(ours: np.ndarray, theirs: np.ndarray, path: Path) -> None:
    """Two rows of pictures: eigen-patches of the whole, and of NumPy's subsample (signs matched)."""
    figure, axes = plt.subplots(2, COMPONENTS, figsize=(1.4 * COMPONENTS, 3.4), layout="constrained")
    for row, (name, vectors) in enumerate({"goblin, all patches": ours, "NumPy, a subsample": theirs}.items()):
        for column in range(COMPONENTS):
            patch = vectors[:, column] * np.sign(vectors[:, column] @ ours[:, column])
            low, high = np.percentile(patch, [1, 99])
            picture = np.clip((patch - low) / (high - low), 0, 1).reshape(SIDE, SIDE, 3)
            axes[row, column].imshow(picture, interpolation="nearest")
            axes[row, column].set_xticks([])
            axes[row, column].set_yticks([])
        axes[row, 0].set_ylabel(name, fontsize=8)
    figure.suptitle("Leading eigen-patches of two photographs")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def similarity(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Cosines of the principal angles between two subspaces of patches."""
    return np.linalg.svd(np.linalg.qr(ours)[0].T @ np.linalg.qr(theirs)[0], compute_uv=False)


def tell(job: goblin.Job) -> None:
    """Where the chunks of a job were computed, how they were verified, and what that moved."""
    certificate, progress = job.certificate, job.progress
    methods = certificate["methods"]
    moved = sum(method.get("bytes_in", 0) + method.get("bytes_out", 0) for method in methods.values())
    print(f"volunteers            {certificate['volunteers']}")
    print(f"chunks on the grid    {progress['grid']}, in the laboratory {progress['lab']}")
    ways = ", ".join(f"{name} ({method['parts']})" for name, method in methods.items())
    print(f"verified by           {ways}")
    print(f"worst residual        {certificate['worst_ratio']:.3g} of its tolerance")
    print(f"bytes moved           {moved / 1e9:.2f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=16384, help="number of patches (rows of the Gram matrix)")
    parser.add_argument("--volunteers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    p = patches(options.size)
    with goblin.LocalGrid(volunteers=options.volunteers) as grid:
        lab = grid.lab
        x = da.from_array(p, chunks=(min(2048, options.size), p.shape[1]))
        tell(lab.to_zarr(x @ x.T, str(options.output / "gram.zarr"), overwrite=True))
        vectors = leading_vectors(da.from_zarr(str(options.output / "gram.zarr")), lab)
    seconds = time.perf_counter() - started
    ours = p.T @ vectors
    theirs = np.linalg.eigh(p[:SUBSAMPLE].T @ p[:SUBSAMPLE])[1][:, ::-1][:, :COMPONENTS]
    draw(ours, theirs, options.output / "eigenpatches.png")
    print(f"agreement with NumPy  {similarity(ours, theirs).min():.3f} (least cosine, {SUBSAMPLE} of the patches)")
    print(f"seconds               {seconds:.1f}")
    print(f"picture               {options.output / 'eigenpatches.png'}")


if __name__ == "__main__":
    main()
