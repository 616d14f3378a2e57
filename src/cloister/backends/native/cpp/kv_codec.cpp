#include "kv_codec.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#define INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nb = nanobind;

namespace cloister {

namespace {

constexpr int num_lanes = KVCodec::num_lanes, num_contexts = KVCodec::num_contexts, num_symbols = KVCodec::num_symbols;
constexpr int scale_bits = KVCodec::scale_bits, escape = num_symbols - 1, middle = num_symbols / 2 - 1;
constexpr uint32_t slots = 1u << scale_bits, lowest_state = 1u << 16;
constexpr int narrow_contexts = 15;             // from this context on, low bits of a residual are written as they are
constexpr int escape_bits = 20;
constexpr int32_t most_integer = 1 << 18;       // so that a residual fits into its bits
constexpr int most_halvings = 7;                // of the step of a position
constexpr int fraction_bits = 4;                // of the running means
constexpr size_t section_bytes = 12 + 4 * num_lanes;

enum Mode : uint8_t { verbatim = 0, exact = 1, rounded = 2 };

template <class T> INLINE T load(const uint8_t* from) {
    T value;
    memcpy(&value, from, sizeof value);
    return value;
}
template <class T> void put(std::vector<uint8_t>& to, T value) {
    size_t at = to.size();
    to.resize(at + sizeof value);
    memcpy(to.data() + at, &value, sizeof value);
}

INLINE int low_bits(int context) { return context < narrow_contexts ? 0 : (context - narrow_contexts) / 2 + 1; }

INLINE int32_t size_of(int context) { return ((context % 2 ? 3 : 2) << (context / 2)) / 2 - 1; }

// What is known of the channels of a plane when a position comes: what its integer will be about, and by how much that will be off.
struct Channels {
    std::vector<int32_t> mean, size, context, predicted;

    explicit Channels(size_t most) : mean(most), size(most), context(most), predicted(most) {}

    // Before the first position: what its integers are about, and the contexts of the first and the second one.
    INLINE void begin(int count, int32_t first, const uint8_t* contexts) {
        for (int c = 0; c < count; c++) {
            predicted[size_t(c)] = first;
            context[size_t(c)] = contexts[0];
            size[size_t(c)] = size_of(contexts[1]);
        }
    }

    // Takes the integers of position t and prepares for the next one. The mean weighs the newest as 1/2, 1/4, 1/4, then 1/8.
    INLINE void learn(const int32_t* integers, int count, int t) {
        int mean_shift = t < 2 ? t : t < 4 ? 2 : 3;
        int32_t size_share = t == 0 ? 0 : -1;  // the first residual says nothing about the next ones
        int32_t *m = mean.data(), *s = size.data(), *x = context.data(), *p = predicted.data();
        for (int c = 0; c < count; c++) {
            int32_t now = integers[c] * (1 << fraction_bits), off = std::abs(integers[c] - p[c]) * (1 << fraction_bits);
            int32_t next = t == 0 ? now : m[c] + ((now - m[c]) >> mean_shift);
            s[c] += ((off - s[c]) >> 2) & size_share;
            m[c] = next;
            p[c] = (next + (1 << (fraction_bits - 1))) >> fraction_bits;
            float above = float(s[c] + 1);
            uint32_t bits;
            memcpy(&bits, &above, sizeof bits);
            int32_t halves = int32_t(bits >> 22) - 2 * 127;  // halves of octaves
            x[c] = halves < num_contexts ? halves : num_contexts - 1;
        }
    }
};

class BitWriter {
public:
    void put(uint32_t bits, int count) {
        held_ |= uint64_t(bits) << num_held_;
        for (num_held_ += count; num_held_ >= 8; num_held_ -= 8, held_ >>= 8) bytes.push_back(uint8_t(held_));
    }
    void finish() {
        if (num_held_) bytes.push_back(uint8_t(held_));
        held_ = 0;
        num_held_ = 0;
    }
    std::vector<uint8_t> bytes;

private:
    uint64_t held_ = 0;
    int num_held_ = 0;
};

// Past its end it reads zeros, and says so at the end.
class BitReader {
public:
    BitReader(const uint8_t* from, size_t size) : at_(from), end_(from + size) {}
    INLINE uint32_t take(int count) {
        for (; num_held_ < count; num_held_ += 8) {
            if (at_ < end_) held_ |= uint64_t(*at_++) << num_held_;
            else is_over_ = true;
        }
        uint32_t bits = uint32_t(held_ & ((uint64_t(1) << count) - 1));
        held_ >>= count;
        num_held_ -= count;
        return bits;
    }
    bool is_whole() const { return !is_over_ && at_ == end_ && held_ == 0; }

private:
    const uint8_t *at_, *end_;
    uint64_t held_ = 0;
    int num_held_ = 0;
    bool is_over_ = false;
};

// So many ones, and a zero where there could be more.
void put_halvings(BitWriter& low, int times) { low.put((1u << times) - 1, std::min(times + 1, most_halvings)); }
INLINE int take_halvings(BitReader& low) {
    int times = 0;
    while (times < most_halvings && low.take(1)) times++;
    return times;
}

// Calls `move(place in the plane, number in the order of positions)` for each number.
template <class F> INLINE void each_number(const KVPlane& plane, F&& move) {
    for (int t = 0; t < plane.num_tokens; t++) {
        size_t row = size_t(t / plane.inner_tokens) * plane.token_stride + size_t(t % plane.inner_tokens) * plane.inner_token_stride;
        size_t i = size_t(t) * size_t(plane.num_channels), stride = plane.channel_stride, inner = plane.inner_channel_stride;
        size_t count = size_t(plane.num_channels / plane.inner_channels);
        if (plane.inner_channels == 1) {
            for (size_t c = 0; c < count; c++) move(row + c * stride, i + c);
        } else if (plane.inner_channels == 2) {
            for (size_t c = 0; c < count; c++) move(row + c * stride, i + 2 * c), move(row + c * stride + inner, i + 2 * c + 1);
        } else {
            for (size_t c = 0; c < count; c++)
                for (size_t k = 0; k < size_t(plane.inner_channels); k++) move(row + c * stride + k * inner, i + c * size_t(plane.inner_channels) + k);
        }
    }
}

void gather(const KVPlane& plane, const uint8_t* content, uint32_t* bits) {
    const uint8_t* from = content + plane.offset;
    if (plane.number_bytes == 2) each_number(plane, [&](size_t at, size_t i) { bits[i] = load<uint16_t>(from + 2 * at); });
    else each_number(plane, [&](size_t at, size_t i) { bits[i] = load<uint32_t>(from + 4 * at); });
}

INLINE void scatter(const KVPlane& plane, const uint32_t* bits, uint8_t* content) {
    uint8_t* to = content + plane.offset;
    if (plane.number_bytes == 2) each_number(plane, [&](size_t at, size_t i) { memcpy(to + 2 * at, bits + i, 2); });
    else each_number(plane, [&](size_t at, size_t i) { memcpy(to + 4 * at, bits + i, 4); });
}

float number_of(uint32_t bits, int number_bytes) {
    uint32_t whole = number_bytes == 2 ? bits << 16 : bits;
    float value;
    memcpy(&value, &whole, sizeof value);
    return value;
}

// The step of a position that halves it so often.
INLINE float halved(float step, int times) { return step / float(1 << times); }

// The multiple of a step, rounded as the numbers of the plane are (to the nearest, ties to even).
INLINE uint32_t bits_of(int32_t integer, float step, int number_bytes) {
    float value = float(integer) * step;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return number_bytes == 4 ? bits : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
}

uint8_t context_of(double size) {
    float above = float(std::min(size, 1e9)) * (1 << fraction_bits) + 1;
    uint32_t bits;
    memcpy(&bits, &above, sizeof bits);
    return uint8_t(std::min(int(bits >> 22) - 2 * 127, num_contexts - 1));
}

// Chooses the step of a plane, how often each position halves it, and the integers; returns false where they would not fit.
bool round_to(const KVPlane& plane, const uint32_t* bits, float relative_step, float* step, int* halvings, int32_t* integers) {
    size_t width = size_t(plane.num_channels), num_tokens = size_t(plane.num_tokens), count = plane.num_numbers();
    double spread = 0, squares = 0;
    for (size_t c = 0; c < width; c++) {
        double sum = 0, square = 0;
        for (size_t i = c; i < count; i += width) {
            double x = double(number_of(bits[i], plane.number_bytes));
            sum += x;
            square += x * x;
        }
        spread += square - sum * sum / plane.num_tokens;
    }
    *step = relative_step * float(std::sqrt(std::max(0.0, spread) / double(count)));
    if (!std::isfinite(*step)) return false;
    *step = std::max(*step, 1e-30f);  // of zeros
    std::vector<double> rows(num_tokens);
    for (size_t t = 0; t < num_tokens; t++) {
        for (size_t c = 0; c < width; c++) {
            double x = double(number_of(bits[t * width + c], plane.number_bytes));
            rows[t] += x * x;
        }
        squares += rows[t];
    }
    // Attention sinks: positions with small numbers and much attention, whose values the step of the others would drown.
    for (size_t t = 0; t < num_tokens; t++) {
        double bound = 2 * rows[t];
        for (halvings[t] = 0; halvings[t] < most_halvings && squares / plane.num_tokens > bound; bound *= 4) halvings[t]++;
        float inverse = 1.0f / halved(*step, halvings[t]);
        for (size_t i = t * width; i < (t + 1) * width; i++) {
            float x = number_of(bits[i], plane.number_bytes) * inverse;
            if (!(std::fabs(x) < float(most_integer - 1))) return false;  // it may be rounded up
            integers[i] = int32_t(std::nearbyint(x));
        }
    }
    return true;
}

int32_t middle_of(const int32_t* row, int count) {
    std::vector<int32_t> sorted(row, row + count);
    std::nth_element(sorted.begin(), sorted.begin() + count / 2, sorted.end());
    return sorted[size_t(count / 2)];
}

// The rANS coders of a stream: what they know, and the words that they have not read. A row has one symbol for each channel.
struct Words {
    const uint8_t *at, *end;
};

INLINE bool take_symbols(uint32_t* states, Words& words, const uint32_t* entries, const int32_t* context, int32_t* symbol, int from, int width) {
    for (int c = from; c < width; c++) {
        uint32_t& x = states[c % num_lanes];
        uint32_t entry = entries[size_t(uint32_t(context[c])) << scale_bits | (x & (slots - 1))];
        symbol[c] = int32_t(entry >> 24);
        x = (entry >> 12 & (slots - 1)) * (x >> scale_bits) + (entry & (slots - 1));
        if (x >= lowest_state) continue;
        if (words.end - words.at < 2) return false;
        x = x << 16 | load<uint16_t>(words.at);
        words.at += 2;
    }
    return true;
}

struct PlainCoders {
    uint32_t states[num_lanes];
    Words words;

    INLINE void begin(const uint8_t* from) { memcpy(states, from, sizeof states); }
    INLINE bool take(const uint32_t* entries, const int32_t* context, int32_t* symbol, int width) {
        return take_symbols(states, words, entries, context, symbol, 0, width);
    }
    INLINE void end(uint32_t* to) { memcpy(to, states, sizeof states); }
};

#if defined(__x86_64__)
#define VECTORS __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

// All coders at once, while words are left for all of them.
struct VectorCoders {
    uint32_t states[num_lanes];
    Words words;

    INLINE void begin(const uint8_t* from) { memcpy(states, from, sizeof states); }
    VECTORS INLINE bool take(const uint32_t* entries, const int32_t* context, int32_t* symbol, int width) {
        __m512i x = _mm512_loadu_si512(states), mask = _mm512_set1_epi32(int(slots - 1));
        int c = 0;
        for (; c + num_lanes <= width && words.end - words.at >= 2 * num_lanes; c += num_lanes) {
            __m512i place = _mm512_or_si512(_mm512_slli_epi32(_mm512_loadu_si512(context + c), scale_bits), _mm512_and_si512(x, mask));
            __m512i entry = _mm512_i32gather_epi32(place, entries, 4);
            _mm512_storeu_si512(symbol + c, _mm512_srli_epi32(entry, 24));
            __m512i frequency = _mm512_and_si512(_mm512_srli_epi32(entry, 12), mask);
            x = _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(x, scale_bits)), _mm512_and_si512(entry, mask));
            __mmask16 needs = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(int(lowest_state)));
            __m512i more = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)words.at));
            x = _mm512_mask_or_epi32(x, needs, _mm512_slli_epi32(x, 16), _mm512_maskz_expand_epi32(needs, more));
            words.at += 2 * __builtin_popcount(needs);
        }
        _mm512_storeu_si512(states, x);
        return take_symbols(states, words, entries, context, symbol, c, width);
    }
    INLINE void end(uint32_t* to) { memcpy(to, states, sizeof states); }
};
#endif

}  // namespace

KVCodec::KVCodec(const uint16_t* frequencies, std::vector<KVPlane> planes, size_t content_bytes)
    : planes_(std::move(planes)), content_bytes_(content_bytes), starts_(size_t(num_contexts) * num_symbols),
      entries_(size_t(num_contexts) << scale_bits) {
    for (int x = 0; x < num_contexts; x++) {
        uint32_t start = 0;
        for (int s = 0; s < num_symbols; s++) {
            uint32_t frequency = frequencies[x * num_symbols + s];
            if (frequency == 0 || start + frequency > slots) throw std::invalid_argument("the frequencies of a model do not sum to its slots");
            starts_[size_t(x * num_symbols + s)] = frequency << 16 | start;
            for (uint32_t k = 0; k < frequency; k++) entries_[(size_t(x) << scale_bits) + start + k] = uint32_t(s) << 24 | frequency << 12 | k;
            start += frequency;
        }
        if (start != slots) throw std::invalid_argument("the frequencies of a model do not sum to its slots");
    }
    size_t sum = 0;
    for (const KVPlane& plane : planes_) {
        bool fits = (plane.number_bytes == 2 || plane.number_bytes == 4) && plane.num_tokens > 0 && plane.num_channels > 0 && plane.num_tokens <= 1 << 16 &&
                    plane.num_channels <= 1 << 20 && plane.inner_tokens > 0 && plane.num_tokens % plane.inner_tokens == 0 && plane.inner_channels > 0 &&
                    plane.num_channels % plane.inner_channels == 0;
        size_t last = fits ? plane.at(plane.num_tokens - 1, plane.num_channels - 1) : 0;
        if (!fits || plane.offset > content_bytes || (content_bytes - plane.offset) / size_t(plane.number_bytes) <= last)
            throw std::invalid_argument("a plane lies beyond its contents");
        sum += plane.num_numbers() * size_t(plane.number_bytes);
        num_numbers_ += plane.num_numbers();
        most_channels_ = std::max(most_channels_, size_t(plane.num_channels));
        most_tokens_ = std::max(most_tokens_, size_t(plane.num_tokens));
        most_numbers_ = std::max(most_numbers_, plane.num_numbers());
    }
    if (sum != content_bytes) throw std::invalid_argument("the planes are not all of the contents");
}

// A stream: what each plane is; the sizes of the three sections and the first states; words of rANS; low bits; verbatim bytes.
size_t KVCodec::encode(const uint8_t* content, const float* steps, uint8_t* out, size_t room) const {
    std::vector<uint8_t> headers, bytes;
    std::vector<uint16_t> symbols;  // context * num_symbols + symbol
    std::vector<uint32_t> bits(most_numbers_);
    std::vector<int32_t> integers(most_numbers_);
    std::vector<int> halvings(most_tokens_);
    std::vector<int> lanes;         // channels of each row that has symbols
    symbols.reserve(num_numbers_);
    BitWriter low;
    Channels channels(most_channels_);
    for (size_t number = 0; number < planes_.size(); number++) {
        const KVPlane& plane = planes_[number];
        int width = plane.num_channels, raw_bits = plane.number_bytes * 8 - 8;
        size_t count = plane.num_numbers();
        gather(plane, content, bits.data());
        float step = 0;
        bool is_rounded = steps[number] > 0 && round_to(plane, bits.data(), steps[number], &step, halvings.data(), integers.data());
        int32_t first = 0;
        if (!is_rounded) {
            for (size_t i = 0; i < count; i++) integers[i] = int32_t(bits[i] >> (raw_bits - 1) & 255);
            first = middle_of(integers.data(), width);
        }
        double size = 0, spread = 0;
        for (int c = 0; c < width; c++) size += std::abs(integers[size_t(c)] - first);
        for (int c = 0; c < width && plane.num_tokens > 1; c++) spread += std::abs(integers[size_t(width + c)] - integers[size_t(c)]);
        uint8_t contexts[2] = {context_of(size / width), context_of(spread / width)};
        headers.push_back(is_rounded ? rounded : exact);
        headers.insert(headers.end(), contexts, contexts + 2);
        if (is_rounded) put(headers, step);
        else headers.push_back(uint8_t(first));
        channels.begin(width, first, contexts);
        for (int t = 0; t < plane.num_tokens; t++) {
            const int32_t* row = integers.data() + size_t(t) * size_t(width);
            if (is_rounded) put_halvings(low, halvings[size_t(t)]);
            for (int c = 0; c < width; c++) {
                int32_t residual = row[c] - channels.predicted[size_t(c)];
                int context = channels.context[size_t(c)], shift = low_bits(context), high = residual >> shift;
                bool fits = high >= -middle && high <= middle;
                symbols.push_back(uint16_t(context * num_symbols + (fits ? high + middle : escape)));
                if (!fits) low.put(uint32_t(residual) & ((1u << escape_bits) - 1), escape_bits);
                else if (shift) low.put(uint32_t(residual) & ((1u << shift) - 1), shift);
            }
            lanes.push_back(width);
            channels.learn(row, width, t);
        }
        if (!is_rounded) {
            for (size_t i = 0; i < count; i++) {
                uint32_t sign = bits[i] >> (plane.number_bytes * 8 - 1), fraction = bits[i] & ((1u << (raw_bits - 1)) - 1);
                uint32_t rest = sign << (raw_bits - 1) | fraction;
                for (int k = 0; k < raw_bits; k += 8) bytes.push_back(uint8_t(rest >> k));
            }
        }
    }
    low.finish();
    // rANS codes from the last symbol to the first, so that the decoder reads forwards (Duda 2013; interleaved as in Giesen 2014).
    std::vector<uint16_t> words;
    words.reserve(symbols.size() / 2);
    uint32_t states[num_lanes];
    std::fill(states, states + num_lanes, lowest_state);
    size_t i = symbols.size();
    for (size_t row = lanes.size(); row-- > 0;) {
        for (int c = lanes[row]; c-- > 0;) {
            uint32_t entry = starts_[symbols[--i]], frequency = entry >> 16, start = entry & 0xffff;
            uint32_t& x = states[c % num_lanes];
            if (x >= uint64_t(frequency) << (32 - scale_bits)) {
                words.push_back(uint16_t(x));
                x >>= 16;
            }
            x = (x / frequency << scale_bits) + x % frequency + start;
        }
    }
    size_t total = headers.size() + section_bytes + 2 * words.size() + low.bytes.size() + bytes.size();
    if (total > room || total > std::numeric_limits<uint32_t>::max()) return 0;
    for (size_t section : {words.size(), low.bytes.size(), bytes.size()}) put(headers, uint32_t(section));
    for (uint32_t state : states) put(headers, state);
    std::reverse(words.begin(), words.end());
    uint8_t* at = std::copy(headers.begin(), headers.end(), out);
    if (!words.empty()) memcpy(at, words.data(), 2 * words.size());
    at = std::copy(low.bytes.begin(), low.bytes.end(), at + 2 * words.size());
    std::copy(bytes.begin(), bytes.end(), at);
    return total;
}

bool KVCodec::decode(const uint8_t* stream, size_t size, uint8_t* content, bool is_plain) const {
#if defined(__x86_64__)
    static const bool has_vectors = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                                    __builtin_cpu_supports("avx512vl");
    if (has_vectors && !is_plain) return decode_vectors(stream, size, content);
#endif
    (void)is_plain;
    return decode_plain(stream, size, content);
}

#define TARGET
#define DECODE decode_plain
#define CODERS PlainCoders
#include "kv_codec.inc"
#undef TARGET
#undef DECODE
#undef CODERS

#if defined(__x86_64__)
#define TARGET VECTORS
#define DECODE decode_vectors
#define CODERS VectorCoders
#include "kv_codec.inc"
#endif

namespace {

template <class T> using Array1 = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Array2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::vector<KVPlane> read_planes(const Array2<const int64_t>& rows) {
    std::vector<KVPlane> planes;
    if (rows.shape(1) != 10) throw std::invalid_argument("a plane is not of ten numbers");
    for (size_t i = 0; i < rows.shape(0); i++) {
        const int64_t* row = rows.data() + i * 10;
        for (int k = 0; k < 10; k++)
            if (row[k] < 0 || row[k] > std::numeric_limits<int32_t>::max()) throw std::invalid_argument("a plane has a number out of range");
        planes.push_back({size_t(row[0]), int(row[1]), int(row[2]), int(row[3]), int(row[4]), int(row[5]), size_t(row[6]), size_t(row[7]), size_t(row[8]), size_t(row[9])});
    }
    return planes;
}

}  // namespace

void bind_kv_codec(nb::module_& m) {
    nb::class_<KVCodec>(m, "KVCodec")
        .def("__init__",
             [](KVCodec* self, const Array2<const uint16_t>& frequencies, const Array2<const int64_t>& planes, size_t content_bytes) {
                 if (frequencies.shape(0) != KVCodec::num_contexts || frequencies.shape(1) != KVCodec::num_symbols)
                     throw std::invalid_argument("the models do not have the codec's contexts and symbols");
                 new (self) KVCodec(frequencies.data(), read_planes(planes), content_bytes);
             })
        .def("encode",
             [](const KVCodec& self, const Array1<const uint8_t>& content, const Array1<const float>& steps, Array1<uint8_t> out) {
                 if (content.size() != self.content_bytes() || steps.size() != self.num_planes()) throw std::invalid_argument("the contents are not those of the planes");
                 nb::gil_scoped_release without_gil;
                 return self.encode(content.data(), steps.data(), out.data(), out.size());
             })
        .def("decode", [](const KVCodec& self, const Array1<const uint8_t>& stream, Array1<uint8_t> content, bool is_plain) {
            if (content.size() != self.content_bytes()) throw std::invalid_argument("the contents are not those of the planes");
            nb::gil_scoped_release without_gil;
            return self.decode(stream.data(), stream.size(), content.data(), is_plain);
        }, nb::arg(), nb::arg(), nb::arg("is_plain") = false);
}

}  // namespace cloister
