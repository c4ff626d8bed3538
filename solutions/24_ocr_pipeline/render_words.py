"""Render words.npz: each word of the chapter as a grey picture, 48 pixels high, black on white.

Needs Pillow and pylopdf-fonts-zh-cn (Noto Sans SC Regular, SIL Open Font License 1.1).
Run in this folder: python render_words.py
"""

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from pylopdf_fonts_zh_cn import sans_path

HEIGHT, SIZE, MARGIN = 48, 34, 8
WORDS = [
    "图优化", "动态形状", "执行上下文", "显存", "内存池", "计时缓存", "分桶填充", "重放", "流与事件", "今日收入", "上海南路", "请勿靠近",
    "TensorRT", "CUDA", "Hello", "Graph", "Stream", "2026", "48000", "75.6%",
]


def render(word: str) -> np.ndarray:
    """Return the word as uint8, HEIGHT × its width: 0 is ink, 255 is paper."""
    font = ImageFont.truetype(str(sans_path()), SIZE)
    left, top, right, bottom = font.getbbox(word)
    picture = Image.new("L", (right - left + 2 * MARGIN, HEIGHT), 255)
    ImageDraw.Draw(picture).text((MARGIN - left, (HEIGHT - (bottom - top)) // 2 - top), word, font=font, fill=0)
    return np.asarray(picture)


if __name__ == "__main__":
    np.savez_compressed("words.npz", **{word: render(word) for word in WORDS})
