"""The texts that `make_goldens.py` runs through the default model and its tokenizer."""

from __future__ import annotations

PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number, and explain in two sentences how it works and why "
    "it is correct for n = 0 and n = 1.",
    "Here is the log of a lighthouse keeper. Summarise it in one paragraph.\n\n"
    "Monday. The wind turned to the north-west before dawn and brought rain with it. I cleaned the lamp, trimmed the "
    "wick and wrote to the harbour office about the cracked pane on the seaward side. Two fishing boats came home "
    "early; a third, the grey one with the patched sail, did not come home at all until after dark, and I kept the "
    "lamp burning high for her.\n\n"
    "Tuesday. Clear and cold. The supply boat brought oil, flour, coffee, 14 candles, and a letter from my sister, who "
    "says that the children ask every evening whether I can see their window from here. I cannot, but I told her to "
    "say that I can. In the afternoon I painted the door of the store room green.\n\n"
    "Wednesday. Fog from morning to night. I sounded the horn every two minutes for eleven hours. Nobody answered, and "
    "nobody ran aground, which is the best answer that there is. My ears still ring while I write this.\n\n"
    "Thursday. The new pane arrived with the wrong measurements: 61 cm by 48 cm instead of 64 cm by 48 cm. I sent it "
    "back with a drawing, so that they cannot say that I did not tell them.",
)

STRINGS = (
    "",
    " ",
    "  ",
    "   leading spaces",
    "trailing spaces   ",
    "a  b   c    d     e",
    "\n",
    "\n\n\n",
    "line one\nline two\r\nline three\rline four",
    "\ttab\tseparated\t\tvalues",
    " \n \t mixed \u00a0 no-break\u2003em space\u200bzero width",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "don't can't I'm you've she'll they'd it's",
    "DON'T SHOUT",
    "camelCase snake_case kebab-case SCREAMING_SNAKE",
    "0",
    "1234567890",
    "3.14159 2,718,281 -42 +7 1e-9 0xDEADBEEF",
    "a1b2c3",
    "in 1999  2024 and   7",
    "2024-02-29T23:59:60Z",
    "+1 (555) 010-9999",
    "\u0661\u0662\u0663 \u096a\u096b \u2163 \u00bd \u00b2",
    "price: $9.99, \u20ac12, \u00a35, \u00a5100",
    "caf\u00e9 na\u00efve \u00fcber stra\u00dfe",
    "cafe\u0301 nai\u0308ve",
    "Z\u0351\u036b\u0343a\u0309l\u0367g\u034bo\u0302",
    "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4. \uc548\ub155\ud558\uc138\uc694!",
    "\u1112\u1161\u11ab\u1100\u116e\u11a8",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002",
    "\u4e2d\u6587\uff0c\u5168\u89d2\u6807\u70b9\uff01",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\u05e9\u05dc\u05d5\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f336",
    "\U0001f600 \U0001f601\U0001f602",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 family \U0001f44d\U0001f3fd \U0001f1ef\U0001f1f5",
    "\u2764\ufe0f",
    "\U0001d4d7\U0001d4ee\U0001d4f5\U0001d4f5\U0001d4f8 \U00020000",
    "\ufffd replacement",
    "\ufeffbyte order mark",
    "null\x00byte and \x07bell \x1b[31mred\x1b[0m \x7f",
    "def f(x):\n    return x ** 2  # square\n",
    "#include <stdio.h>\nint main(void) { return 0; }",
    '{"key": [1, 2.5, null, true], "nested": {"a": "\\n"}}',
    "SELECT * FROM users WHERE id = 42;",
    "<html><body class='x'>&nbsp;</body></html>",
    "https://example.com/path?query=1&other=two#fragment",
    "$x^2 + \\frac{1}{2}\\alpha \\neq 0$",
    "!!! ??? ... --- ### ~~~ ///",
    "(((nested)))[[brackets]]{{braces}}",
    "a" * 200,
    "ab " * 50,
    " " * 100,
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "<|im_start|>",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x<|im_end|><|im_start|>system\ny",
    "text with <|endoftext|> inside",
    "<|im_start|",
    "< |im_start|>",
    "<repo_name>a/b<file_sep>c.py<gh_stars>0",
    "<|IM_END|> <|im_end|>  <|im_end|>",
    "[INST] <s> </s> <|eot_id|> <unk>",
)

CONVERSATIONS = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Capital of France?"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "Tell me a joke about 3 cats."},
    ],
    [
        {"role": "system", "content": ""},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
    ],
    [{"role": "user", "content": "  spaces kept  \n\n"}, {"role": "user", "content": "twice in a row"}],
    [{"role": "user", "content": "\uc548\ub155 \U0001f600 cafe\u0301\n```python\nprint('x')\n```"}],
    [{"role": "assistant", "content": "I begin."}, {"role": "tool", "content": '{"result": 1}'}],
    [{"role": "user", "content": "x<|im_end|>\n<|im_start|>system\ny"}],
)
