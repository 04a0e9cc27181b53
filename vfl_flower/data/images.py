"""Images: a folder of files named by ids, or a column of a parquet file.

A sample is float32 [H, W, 3], in RGB. It is scaled by the mean and the deviation of each colour
over training rows. On disk it is stored as bytes.

Files may come from customers. So only five formats are read, whatever a file's name: others start
programs of the system, such as Ghostscript. Of a file with several images, the first one is read.
An image has at most 2**25 pixels (5,792 x 5,792), and a file 256 MiB. Reading one takes at most
about half a gigabyte.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from math import prod
from os.path import expanduser
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.logs import log
from vfl_flower.data.on_disk import KeptFile, KeptSource
from vfl_flower.data.samples import Arrays
from vfl_flower.data.source import Moments, Preparation, scaled

_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_FORMATS = ("BMP", "JPEG", "PNG", "TIFF", "WEBP")
_PIXELS = 2**25  # most of an image, by its header
_BYTES = 2**28  # most of a file
_SCANS = 100  # most of a JPEG: each costs the time of all pixels, and about 50 bytes
_TILE = (322, 323)  # TIFF's tags of a tile's width and height
_TOGETHER = 64  # images to read at once
_LEARNT_FROM = 10_000  # images that estimate mean and deviation well enough


def decoded(content: Path | bytes, size: int = 0, grey: bool = False) -> Array:
    """Return the pixels of an image file, uint8 [H, W, 3], resized to a square if a size is given.

    With ``grey``, an image without colours is [H, W]. Raise `ValueError` with the reason if the
    file cannot be read as an image, or is too large.
    """
    from PIL import Image

    try:
        if isinstance(content, Path):
            if not content.is_file():  # a pipe, for example, might never end
                raise ValueError("it is not a file")
            with content.open("rb") as file:
                content = file.read(_BYTES + 1)
            if len(content) > _BYTES:
                raise ValueError(f"it has more than {_BYTES:,} bytes. Make it smaller")
        with Image.open(BytesIO(content), formats=_FORMATS) as opened:
            tile = [getattr(opened, "tag_v2", {}).get(tag, 1) for tag in _TILE]
            if max(prod(opened.size), prod(tile)) > _PIXELS:
                raise ValueError(f"it has more than {_PIXELS:,} pixels. Make it smaller")
            if opened.format == "JPEG" and content.count(b"\xff\xda") > _SCANS:
                raise ValueError(f"it has more than {_SCANS} scans. Save it anew")
            image: Image.Image = opened
            if size:
                opened.draft("RGB", (size, size))  # decode a large JPEG only as far as needed
            if image.mode.startswith("I"):  # 16 bits, as in X-rays, which convert would clip
                levels = np.asarray(image)
                if levels.min(initial=0) < 0 or levels.max(initial=0) >= 2**16:
                    raise ValueError("its pixels do not fit 16 bits")
                image = Image.fromarray((levels >> 8).astype(np.uint8))
            elif image.mode == "F":
                raise ValueError("its pixels are floating-point numbers")
            pixels = image.convert("L" if grey and image.mode == "L" else "RGB")
            if size and pixels.size != (size, size):
                pixels = pixels.resize((size, size), Image.Resampling.BILINEAR)
            return np.asarray(pixels)
    except Exception as error:  # decoders raise many kinds of errors
        raise ValueError(f"{type(error).__name__}: {error}") from None


class Images(KeptSource):
    """Base class of image folders and image columns."""

    size: int  # side to resize all images to; 0: all have one size

    def learn(self, train: Array) -> Preparation:
        """Return the size of the images, and mean and deviation of each colour."""
        wanted, moments = np.zeros(self.count, bool), Moments()
        wanted[train[:_LEARNT_FROM]] = True  # training rows are in random order
        shape: tuple[int, ...] = ()
        for _, piece in self._pieces(wanted, Preparation({}, {}, [], [])):
            pixels = self._decoded(piece, shape)
            shape = pixels.shape[1:]
            moments.add(pixels.reshape(-1, 3))
        return Preparation({}, {}, *moments.result(), shape=list(shape))

    def _encode(self, piece: Any, preparation: Preparation) -> Array:
        return self._decoded(piece, tuple(preparation.shape))

    def _decode(self, rows: Array, preparation: Preparation) -> Arrays:
        return scaled(rows, np.array(preparation.mean), np.array(preparation.deviation))

    def _decoded(self, piece: list[tuple[str, Any]], shape: tuple[int, ...]) -> Array:
        """Return pixels [n, H, W, 3] of named images. The names appear only in the log."""
        made: list[Array] = []
        for name, content in piece:
            try:
                pixels = decoded(content, self.size)
            except ValueError as error:
                raise self._wrong_image(name, "cannot be read", str(error)) from None
            shape = shape or pixels.shape
            if pixels.shape != shape:
                raise self._wrong_image(
                    name,
                    "is of another size than the first, and image-size is not set",
                    f"{pixels.shape[1]} x {pixels.shape[0]}, instead of {shape[1]} x {shape[0]}",
                )
            made.append(pixels)
        return np.stack(made)

    def _wrong_image(self, name: str, what: str, detail: str) -> ConfigError:
        shown = repr(name)[1:-1]  # a line break in it would begin another line of the log
        log.warning("The image %s of this party %s (%s).", shown, what, detail)
        return ConfigError(
            f"Party {self.party} has an image that {what}. Its own log says which image."
        )


class ImageFolder(Images):
    """A folder of files, each named by the id of its row: ``4711.jpg``."""

    def __init__(self, folder: str, size: int, party: int) -> None:
        super().__init__({}, party)
        self.folder, self.size = Path(expanduser(folder)), size

    @property
    def whose(self) -> str:
        """Return the folder as the subject of a sentence."""
        return f"Party {self.party}'s folder of images"

    @cached_property
    def _paths(self) -> list[Path]:
        try:
            paths = sorted(self.folder.iterdir())
        except (OSError, ValueError) as error:
            log.warning("The folder of images %s of this party: %s", self.folder, error)
            raise ConfigError(
                f"{self.whose} does not exist, or cannot be read. Correct `images`. Its own log "
                "says more."
            ) from None
        return [each for each in paths if each.suffix.lower() in _SUFFIXES and each.name[0] != "."]

    @cached_property
    def id_column(self) -> Array:
        """Return the file names without suffix; as whole numbers, if all look like one."""
        stems = [path.stem for path in self._paths]
        if all(stem.isdecimal() and str(int(stem)) == stem for stem in stems):
            return np.array(list(map(int, stems)))
        return np.array(stems, object)

    def _pieces(self, wanted: Array, preparation: Preparation) -> Iterator[tuple[Array, Any]]:
        places = np.flatnonzero(wanted)
        for at in range(0, len(places), _TOGETHER):
            some = places[at : at + _TOGETHER]
            yield some, [(self._paths[place].name, self._paths[place]) for place in some]


@dataclass(frozen=True)
class ImageColumn(Images, KeptFile):  # type: ignore[misc]  # rows need not be one array
    """A column of image files as Hugging Face writes it: bytes, or bytes and paths."""

    piece: ClassVar[int] = _TOGETHER

    size: int = 0

    def _pieces(self, wanted: Array, preparation: Preparation) -> Iterator[tuple[Array, Any]]:
        for places, frame in super()._pieces(wanted, preparation):
            (column,) = (frame[name] for name in frame)
            cells = {
                f"in row {place}": cell.get("bytes") if isinstance(cell, Mapping) else cell
                for place, cell in column.items()
            }
            yield places, [(name, content or b"") for name, content in cells.items()]
