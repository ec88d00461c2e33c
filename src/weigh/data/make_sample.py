#!/usr/bin/env python3
"""Writes sample.txt: the text on which each tokenizer's approximation is fitted and its additivity tested.

Prose was written for this file; code, JSON, logs and binary-looking text are generated from a seed.
Run it in this directory; the result is committed, so that a build needs no Python.
"""
import base64
import json
import random
import uuid

PROSE = {
    "en": """The lorry rolled onto the weighbridge a little after six in the morning, its tarpaulin still wet from the crossing. Nobody in the office looked up; they had seen a hundred like it, and the kettle was about to boil. "Thirty-one tonnes," said the clerk, "and you're only cleared for twenty-eight." The driver shrugged, as if the extra weight had climbed aboard by itself somewhere along the coast road.
What makes a queue fair? Some would say that whoever came first should be served first, and for a bakery this is usually good enough. A hospital thinks differently, because the cost of waiting isn't the same for everyone. Computers that serve many people at once have borrowed both ideas: they keep several queues, give each a share, and let nobody wait for ever.
Heavy rain is expected across the northern valleys tonight, with gusts of up to 90 km/h near the ridge. Travellers should allow extra time; ferries between the islands may be cancelled at short notice. By Thursday afternoon the front will have moved east, leaving clear skies and unusually mild temperatures for late November.
To make the dough, warm the milk until it's just above body temperature, stir in the yeast and a teaspoon of sugar, and leave it for ten minutes. Add flour, melted butter, two eggs, cardamom, and a pinch of salt; knead until smooth. Let it rise for an hour, shape into buns, brush with egg, and bake at 220 degrees until golden brown.
Quarterly revenue grew by 14.2 percent year over year, driven mainly by subscription renewals in the mid-market segment. Operating margin declined slightly because of one-off restructuring charges and currency effects. Management reiterated its full-year guidance, although analysts questioned whether the assumptions about customer churn remain realistic.
Photosynthesis converts carbon dioxide and water into glucose and oxygen; chlorophyll absorbs mostly red and blue light, which is why leaves look green to us. Mitochondria, by contrast, release that stored energy through respiration. Misunderstanding this relationship is surprisingly common: plants respire too, day and night.
I don't think we've met. You'll find that she's already left, hasn't she? They'd have told you, wouldn't they, if there'd been any trouble. It's nobody's fault; let's say the timetable's wrong and leave it there. Could you summarise the attached document in three bullet points and tell me which risks deserve the board's attention?
""",
    "de": """Der Lastwagen fuhr kurz nach sechs Uhr auf die Fahrzeugwaage, und die Plane war noch nass von der Überfahrt. Im Büro blickte niemand auf; der Wasserkocher pfiff gerade. „Einunddreißig Tonnen“, sagte die Angestellte, „zugelassen sind aber nur achtundzwanzig.“ Geschwindigkeitsbegrenzungen, Sondergenehmigungen und Haftpflichtversicherungen wurden ausführlich besprochen. Könnten Sie mir bitte die wichtigsten Änderungen der Datenschutzgrundverordnung zusammenfassen? Außerdem hätte ich gern gewusst, ob die Übergangsfrist für Kleinunternehmen verlängert wird.
""",
    "fr": """Le camion s'est arrêté sur le pont-bascule peu après six heures, la bâche encore trempée par la traversée. Personne n'a levé les yeux : l'eau allait bientôt bouillir. « Trente et une tonnes », dit l'employée, « alors que vous n'êtes autorisé qu'à vingt-huit. » Pourriez-vous résumer l'article ci-joint en quelques phrases, puis m'expliquer où sont les difficultés d'interprétation ? À côté de l'évêché, un garçon naïf mangeait des œufs brouillés et des crêpes.
""",
    "es": """El camión llegó a la báscula poco después de las seis de la mañana, con la lona todavía mojada. «Treinta y una toneladas», dijo la empleada, «y usted sólo tiene permiso para veintiocho». ¿Podría explicarme cómo funciona el equilibrio de carga entre varios servidores? El niño pequeño soñaba con montañas, ríos y pájaros de todos los colores; mañana viajará con su abuela a Logroño.
""",
    "pt": """O caminhão chegou à balança pouco depois das seis da manhã, com a lona ainda molhada da travessia. Ninguém levantou os olhos; a água já ia ferver. Você poderia traduzir este parágrafo e explicar a diferença entre as duas opções de configuração? Amanhã não haverá aula, pois as estradas estão alagadas.
""",
    "it": """Il camion si fermò sulla pesa poco dopo le sei del mattino, con il telone ancora bagnato. «Trentuno tonnellate», disse l'impiegata, «ma l'autorizzazione è per ventotto». Potresti spiegarmi perché la coda è così lunga e quali alternative ci sono? Perciò l'università ha già pubblicato gli orari.
""",
    "pl": """Ciężarówka wjechała na wagę tuż po szóstej rano, a plandeka była jeszcze mokra. „Trzydzieści jeden ton” – powiedziała urzędniczka – „a pozwolenie jest tylko na dwadzieścia osiem”. Czy mógłbyś wyjaśnić, dlaczego kolejka się wydłuża i jak można ją skrócić? Źdźbło trawy drżało na wietrze.
""",
    "tr": """Kamyon sabah altıyı biraz geçe kantara girdi; brandası hâlâ ıslaktı. «Otuz bir ton», dedi memur, «oysa izniniz yirmi sekiz için». Bu belgeyi üç maddede özetleyip hangi risklerin önemli olduğunu söyleyebilir misiniz? Öğrencilerin çoğu İstanbul'dan gelmişti.
""",
    "vi": """Chiếc xe tải dừng trên cầu cân lúc hơn sáu giờ sáng, tấm bạt vẫn còn ướt. Không ai trong văn phòng ngẩng lên. Bạn có thể tóm tắt tài liệu này thành ba ý chính và cho biết rủi ro nào quan trọng nhất không? Ngày mai trời sẽ nắng và ấm hơn bình thường.
""",
    "ru": """Грузовик въехал на весы вскоре после шести утра, и брезент был ещё мокрым после переправы. В конторе никто не поднял головы: чайник вот-вот должен был закипеть. «Тридцать одна тонна, — сказала служащая, — а разрешено только двадцать восемь». Не могли бы вы объяснить, почему растёт очередь и как распределить нагрузку между серверами? Завтра ожидаются сильный дождь и порывы ветра до двадцати пяти метров в секунду.
""",
    "uk": """Вантажівка заїхала на ваги незабаром після шостої ранку, і брезент був іще мокрий. Чи могли б ви пояснити, чому зростає черга та як її скоротити? Завтра очікується сильний дощ, а надвечір проясниться.
""",
    "el": """Το φορτηγό ανέβηκε στη γεφυροπλάστιγγα λίγο μετά τις έξι το πρωί και ο μουσαμάς ήταν ακόμη βρεγμένος. Μπορείτε να συνοψίσετε το κείμενο σε τρία σημεία; Αύριο ο καιρός θα είναι καλύτερος.
""",
    "ar": """دخلت الشاحنة إلى الميزان بعد السادسة صباحًا بقليل، وكان الغطاء لا يزال مبللًا. لم يرفع أحد في المكتب رأسه، فقد كان الماء على وشك الغليان. هل يمكنك تلخيص هذه الوثيقة في ثلاث نقاط وشرح المخاطر المهمة؟ سيكون الطقس غدًا صافيًا ودافئًا.
""",
    "he": """המשאית עלתה על המאזניים קצת אחרי שש בבוקר, והברזנט עדיין היה רטוב. האם תוכל לסכם את המסמך בשלוש נקודות ולהסביר אילו סיכונים חשובים? מחר יהיה חם מהרגיל.
""",
    "hi": """ट्रक सुबह छह बजे के कुछ देर बाद धर्मकाँटे पर आया और उसका तिरपाल अब भी गीला था। दफ़्तर में किसी ने सिर नहीं उठाया। क्या आप इस दस्तावेज़ का सारांश तीन बिंदुओं में दे सकते हैं और बता सकते हैं कि कौन से जोखिम महत्वपूर्ण हैं? कल मौसम साफ़ रहेगा।
""",
    "th": """รถบรรทุกขึ้นมาบนเครื่องชั่งหลังหกโมงเช้าเล็กน้อย ผ้าใบยังเปียกอยู่ คุณช่วยสรุปเอกสารนี้เป็นสามข้อและบอกว่าความเสี่ยงใดสำคัญที่สุดได้ไหม พรุ่งนี้อากาศจะแจ่มใส
""",
    "ko": """트럭은 아침 여섯 시가 조금 지나서 계량대에 올라섰고, 방수포는 아직 젖어 있었다. 사무실에서는 아무도 고개를 들지 않았다. 이 문서를 세 가지 요점으로 요약하고 어떤 위험이 중요한지 설명해 주시겠어요? 내일은 날씨가 맑고 평년보다 따뜻하겠습니다. 서버 여러 대에 요청을 어떻게 나누어야 할까요?
""",
    "ja": """トラックは朝六時すぎに計量台に乗り、防水シートはまだ濡れていた。事務所では誰も顔を上げなかった。お湯がちょうど沸くところだったからだ。「三十一トンです」と係員は言った。「許可は二十八トンまでですよ。」この文書を三つの要点にまとめて、どのリスクが重要か説明していただけますか。サーバーの負荷をどのように分散すればよいでしょうか。明日は晴れて、平年より暖かくなる見込みです。コンピューターのメモリーとプロセッサーについてのマニュアルを参照してください。
""",
    "zh": """清晨六点刚过，卡车驶上了地磅，篷布还因为渡海而湿漉漉的。办公室里没有人抬头，水马上就要烧开了。“三十一吨，”职员说，“可是您的许可只有二十八吨。”请把这份文件总结成三个要点，并说明哪些风险最值得董事会注意。多台服务器之间应该怎样分配请求，才能让每个人都不必等待太久？明天北部山区有大雨，阵风可达每小时九十公里；周四下午天气转晴，气温比往年同期偏高。季度收入同比增长百分之十四点二，主要来自订阅续费。
""",
    "zh-tw": """清晨六點剛過，卡車駛上了地磅，篷布還濕漉漉的。請把這份文件總結成三個要點，並說明哪些風險最值得注意。伺服器之間應該怎樣分配請求，才能讓每個人都不必等待太久？
""",
}

CODE = [
    '''use std::collections::HashMap;

/// Counts words in a text.
pub fn count_words(text: &str) -> HashMap<String, usize> {
    let mut counts = HashMap::new();
    for word in text.split_whitespace() {
        *counts.entry(word.to_lowercase()).or_insert(0) += 1;
    }
    counts
}

#[derive(Debug, Clone, PartialEq)]
enum Shape {
    Circle { radius: f64 },
    Rectangle { width: f64, height: f64 },
}

impl Shape {
    fn area(&self) -> f64 {
        match self {
            Shape::Circle { radius } => std::f64::consts::PI * radius.powi(2),
            Shape::Rectangle { width, height } => width * height,
        }
    }
}
''',
    '''import asyncio
from dataclasses import dataclass, field
from typing import Optional


@dataclass
class Replica:
    name: str
    tokens_per_second: float = 1000.0
    booked: int = 0
    history: list[int] = field(default_factory=list)

    def load(self, extra: int = 0) -> float:
        """Seconds of work booked on this replica."""
        return (self.booked + extra) / self.tokens_per_second


async def choose(replicas: list[Replica], tokens: int) -> Optional[Replica]:
    if not replicas:
        return None
    best = min(replicas, key=lambda r: r.load(tokens))
    best.booked += tokens
    await asyncio.sleep(0)
    return best


if __name__ == "__main__":
    pool = [Replica(f"gpu-{i}", 800 + 100 * i) for i in range(4)]
    print(asyncio.run(choose(pool, 512)))
''',
    '''export function debounce<T extends (...args: unknown[]) => void>(fn: T, waitMs = 250): T {
  let timer: ReturnType<typeof setTimeout> | undefined;
  return ((...args: unknown[]) => {
    if (timer !== undefined) clearTimeout(timer);
    timer = setTimeout(() => fn(...args), waitMs);
  }) as T;
}

const rows = await fetch(`/api/v2/items?limit=${limit}&offset=${offset}`)
  .then((response) => (response.ok ? response.json() : Promise.reject(response.status)))
  .catch((error) => console.error("request failed", error));
document.querySelectorAll(".item > a[href^='https']").forEach((el) => el.classList.add("external"));
''',
    '''#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct node { int key; struct node *left, *right; } node_t;

static node_t *insert(node_t *root, int key)
{
\tif (root == NULL) {
\t\tnode_t *n = calloc(1, sizeof(*n));
\t\tif (!n) { perror("calloc"); exit(EXIT_FAILURE); }
\t\tn->key = key;
\t\treturn n;
\t}
\tif (key < root->key) root->left = insert(root->left, key);
\telse if (key > root->key) root->right = insert(root->right, key);
\treturn root;
}
''',
    '''SELECT c.customer_id, c.full_name, SUM(o.total_amount) AS revenue, COUNT(*) FILTER (WHERE o.status = 'shipped')
FROM customers AS c
LEFT JOIN orders o ON o.customer_id = c.customer_id AND o.created_at >= NOW() - INTERVAL '90 days'
GROUP BY c.customer_id, c.full_name
HAVING SUM(o.total_amount) > 1000.00
ORDER BY revenue DESC NULLS LAST LIMIT 50;
''',
    '''#!/usr/bin/env bash
set -euo pipefail
for f in "$HOME"/logs/*.log.gz; do
  zcat -- "$f" | awk -F'\\t' '$3 >= 500 { n[$2]++ } END { for (k in n) printf "%-40s %6d\\n", k, n[k] }' | sort -k2 -rn | head -20
done
curl -fsSL https://example.org/install.sh -o /tmp/install.sh && sha256sum /tmp/install.sh
''',
    '''<!DOCTYPE html>
<html lang="en">
  <head><meta charset="utf-8"><title>Status</title><link rel="stylesheet" href="/static/main.css"></head>
  <body class="page page--dark" data-theme="dark">
    <ul id="nav"><li><a href="/">Home</a></li><li><a href="/docs?version=2.1#intro">Docs</a></li></ul>
    <p style="margin: 0 auto; max-width: 42rem">Everything is <strong>working</strong> &amp; healthy.</p>
  </body>
</html>
''',
    '''# Load balancing

A **short** note, with `inline code`, a [link](https://example.org/a/b?c=d&e=f%20g#h) and a table:

| policy | TTFT p99 (s) | E2E mean (s) |
|---|---:|---:|
| round robin | 17.3 | 16.1 |
| least tokens | 10.6 | 15.98 |

1. First, measure.
2. Then decide; never the other way round.
   - nested item with *emphasis*
   - another one

> Quoted text: "what is not measured is guessed".
''',
    '''func (s *Server) handleHealth(w http.ResponseWriter, r *http.Request) {
\tctx, cancel := context.WithTimeout(r.Context(), 2*time.Second)
\tdefer cancel()
\tif err := s.db.PingContext(ctx); err != nil {
\t\thttp.Error(w, fmt.Sprintf("database: %v", err), http.StatusServiceUnavailable)
\t\treturn
\t}
\tw.Header().Set("Content-Type", "application/json")
\tjson.NewEncoder(w).Encode(map[string]any{"status": "ok", "uptimeSeconds": int(time.Since(s.start).Seconds())})
}
''',
]

WORDS = "request replica token queue weight latency system prompt answer model server memory cache prefix stream window budget tenant priority history estimate measure balance engine batch decode prefill context limit".split()


def logs(rng, lines):
    for _ in range(lines):
        yield (
            f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}T{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:"
            f"{rng.randint(0, 59):02}.{rng.randint(0, 999):03}Z {rng.choice(['INFO', 'WARN', 'ERROR', 'DEBUG'])} "
            f"[{rng.choice(WORDS)}-{rng.randint(1, 64)}] {rng.choice(WORDS)}_{rng.choice(WORDS)}={rng.randint(0, 99999)} "
            f"ip=10.{rng.randint(0, 255)}.{rng.randint(0, 255)}.{rng.randint(0, 255)} took {rng.random() * 900:.3f}ms "
            f"id={uuid.UUID(int=rng.getrandbits(128))}\n"
        )


def document(rng):
    item = lambda: {
        "id": rng.randint(1, 10**7),
        "name": " ".join(rng.sample(WORDS, 2)).title(),
        "tags": rng.sample(WORDS, 3),
        "price": round(rng.random() * 1000, 2),
        "active": rng.random() < 0.5,
        "parent": None,
        "createdAt": f"2025-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}T08:{rng.randint(10, 59)}:00+01:00",
        "location": {"lat": round(rng.uniform(-90, 90), 5), "lon": round(rng.uniform(-180, 180), 5)},
    }
    return {"items": [item() for _ in range(4)], "nextCursor": base64.b64encode(rng.randbytes(12)).decode(), "total": rng.randint(4, 900)}


def schema(rng):
    name = "_".join(rng.sample(WORDS, 2))
    properties = {
        w: {"type": rng.choice(["string", "integer", "boolean", "number"]), "description": f"The {w} of the {rng.choice(WORDS)}, if any."}
        for w in rng.sample(WORDS, 4)
    }
    return {"type": "function", "function": {"name": name, "description": f"Sets the {name.replace('_', ' ')}.", "parameters": {"type": "object", "properties": properties, "required": list(properties)[:2]}}}


def main():
    rng = random.Random(20261129)
    out = []
    for _ in range(2):
        for language, text in PROSE.items():
            sentences = text.split("\n")[:-1]
            out.append("\n".join(sentences) + "\n\n")
            if language == "en":
                # Words in new orders, so that the fit sees more than one arrangement.
                words = text.split()
                rng.shuffle(words)
                out.append(" ".join(words[:220]) + "\n")
        out += CODE
        out.append(json.dumps(document(rng), indent=2) + "\n")
        out.append(json.dumps(document(rng)) + "\n")
        out.append(json.dumps(document(rng), separators=(",", ":")) + "\n")
        out.append("".join(json.dumps(schema(rng)) + "\n" for _ in range(4)))
        out.append("".join(logs(rng, 14)))
        out.append(base64.b64encode(rng.randbytes(1600)).decode() + "\n")
        out.append(rng.randbytes(500).hex() + "\n")
        out.append("\n".join(",".join(f"{rng.gauss(0, 50):.4f}" for _ in range(8)) for _ in range(12)) + "\n")
        out.append(" ".join(str(rng.randint(0, 10 ** rng.randint(1, 9))) for _ in range(150)) + "\n")
        out.append("😀 👍🏽 🎉 ok 🚀🚀 ✅ done ❌ no — “quotes” … €20 £5 ¥300 ½ × ± → ≤ ∑ √2 α β γ\n")
        out.append("    indented\n\n\n\t\ttabs\n        deep        wide\n" * 6)
        out.append("!!! ??? ... --- *** ### $$$ %%% ((())) [[[]]] {{{}}} <<<>>> ~~~ ``` ||| \\\\\\ /// ::: ;;;\n" * 3)
        rng.shuffle(out)
    with open("sample.txt", "w", encoding="utf-8", newline="\n") as file:
        file.write("".join(out))


main()
